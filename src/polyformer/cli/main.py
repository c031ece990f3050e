"""`polyformer COMMAND ...`: run a command and print input errors as one line."""

import errno
import os
import sys
from collections.abc import Sequence

from polyformer.cli.commands import COMMANDS, DISTRIBUTION, is_installed, load_command
from polyformer.core.errors import InputError, quote, unknown

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
    from polyformer.cli.own_output import own_output

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


if __name__ == "__main__":
    sys.exit(main())
