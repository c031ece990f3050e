"""`polyformer COMMAND ...`: run a command and print input errors as one line.

What a command prints is its own: no progress bars, log messages and warnings of other libraries. Only the
process of a command is changed, never a program that imports polyformer. Variables that the user sets and
Python's option -W take precedence.
"""

import contextlib
import errno
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from polyformer.cli.commands import COMMANDS, DISTRIBUTION, is_installed, load_command
from polyformer.core.errors import Caution, InputError, quote, unknown

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # exit statuses

SPINS = "1000"
"""Number of times a thread of GNU OpenMP polls for work before it sleeps. The default, 300,000 times, takes a
millisecond or more. On a busy machine, spinning threads occupy cores that other threads need: a training step
with two threads took four times as long with the default. On an idle machine it was at most 10 % faster."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's variable that allocates tensors of 2 MiB or more in huge pages. A training step writes to gigabytes
of new memory, and each 4 KiB page costs a page fault."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0, 2 for bad input, 128 + N after signal N (Ctrl-C: 130)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()  # here, where a broken pipe is caught
        return status
    except InputError as error:
        return _print_error(str(error))
    except KeyboardInterrupt:
        print("\npolyformer: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe. Flushing the remaining buffer at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _print_error(f"{quote(error.filename)}: no such file or folder; the name is too long")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        return _print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}")


def _dispatch(words: list[str]) -> int:
    """Find the command and run it; return its exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        import polyformer

        print(f"polyformer {polyformer.__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    if name != "bench" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # must be set before torch is loaded
    os.environ.setdefault(HUGE_PAGES, "1")  # must be set before torch's first tensor
    from polyformer.cli.commands.options import parse, redirected_messages

    try:
        with own_output():
            command = load_command(name)
            options = parse(name, command, rest)
            with redirected_messages(options):
                command.run(options)
    except SystemExit as stop:  # --help, and interrupted trainings
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def _help() -> str:
    lines = [
        "usage: polyformer COMMAND ...",
        "",
        "Train, use and measure models of the Transformer family.",
        "",
        "commands:",
    ]
    for name, text in COMMANDS.items():
        lines.append(f"  {name:<12}{text if is_installed(name) else f'Requires {DISTRIBUTION}.'}")
    end = "polyformer COMMAND --help shows options and examples; polyformer --version prints the version."
    return "\n".join([*lines, "", end])


def _print_error(message: str) -> int:
    print(f"polyformer: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE


VARIABLES = {
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-all",  # only errors
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Variables that libraries read when they are imported."""


@contextlib.contextmanager
def own_output() -> Iterator[None]:
    """Hide the messages of other libraries within the context, and print our warnings in one line each."""
    import logging  # not for `polyformer --help`

    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    last = logging.lastResort  # prints warnings of libraries that configure no logging
    level = logging.NOTSET if last is None else last.level
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("default", Caution)
            warnings.showwarning = _show
        if last is not None:
            last.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if last is not None:
                last.setLevel(level)


def _show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print a warning of polyformer, and leave out others."""
    if issubclass(category, Caution):
        print(f"polyformer: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
