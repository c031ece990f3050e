"""`polyformer COMMAND ...`: finds the command, and prints errors of the input in one line."""

import errno
import os
import sys
from collections.abc import Sequence

from polyformer.cli.commands import COMMANDS, is_installed, load_command
from polyformer.core.errors import InputError, quote, unknown

USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # exit statuses

SPINS = "1000"
"""How often a thread of GNU's OpenMP looks for work before it sleeps; by default 300,000 times, for a
millisecond or more. On a machine whose cores are busy the threads that spin keep those away that have work:
a training step by two threads took four times as long by default, and on an idle one at most a tenth less."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch's variable for tensors of 2 MiB or more in huge pages: a training step writes to gigabytes of fresh
memory, and each of its pages of 4 KiB costs a call of the system."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for bad input, 128 + N after signal N (Ctrl-C: 130)."""
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
        # The reader has closed the pipe; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return _print_error(f"{quote(error.filename)}: no such file or folder, its name is too long")
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        return _print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}")


def _dispatch(words: list[str]) -> int:
    """Find the command and run it; returns its exit status."""
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
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded, which is later
    os.environ.setdefault(HUGE_PAGES, "1")  # read at torch's first tensor
    from polyformer.cli.commands.options import messages_of, parse

    command = load_command(name)
    try:
        options = parse(name, command, rest)
        with messages_of(options):
            command.run(options)
    except SystemExit as stop:  # --help, and interrupted trainings
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def _help() -> str:
    lines = [
        "usage: polyformer COMMAND ...",
        "",
        "The whole Transformer family: train, use and measure models.",
        "",
        "commands:",
    ]
    for name in COMMANDS:
        text = (load_command(name).__doc__ or "") if is_installed(name) else "Needs polyformer-lab."
        lines.append(f"  {name:<11}{text.splitlines()[0]}")
    return "\n".join(
        [*lines, "", "polyformer COMMAND --help shows its options and examples; polyformer --version."]
    )


def _print_error(message: str) -> int:
    print(f"polyformer: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
