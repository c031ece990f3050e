"""`polyformer COMMAND ...`: finds the command, and turns what goes wrong into one line."""

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from polyformer.core.errors import InputError, unknown

COMMANDS = (
    "train",
    "evaluate",
    "generate",
    "translate",
    "classify",
    "tag",
    "list",
    "show",
    "bench",
    "reproduce",
)
USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # exit statuses


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 for bad input, 130 when interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(words)
        sys.stdout.flush()
    except InputError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("\npolyformer: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has enough; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        return _complain(f"cannot write {error.filename or 'the output'}: {error.strerror}")
    except SystemExit as error:  # --help, and interrupted trainings
        return error.code if isinstance(error.code, int) else 0
    return 0


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return
    if words[0] == "--version":
        import polyformer

        print(f"polyformer {polyformer.__version__}")
        return
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise unknown("command", name, COMMANDS)
    from polyformer.commands.base import parse

    command = importlib.import_module(f"polyformer.commands.{name}")
    command.run(parse(name, command, rest))


def _help() -> str:
    lines = [
        "usage: polyformer COMMAND ...",
        "",
        "The whole Transformer family: train, use and measure.",
        "",
        "commands:",
    ]
    for name in COMMANDS:
        text = importlib.import_module(f"polyformer.commands.{name}").__doc__ or ""
        lines.append(f"  {name:<11}{text.splitlines()[0]}")
    return "\n".join(
        [*lines, "", "polyformer COMMAND --help tells more, with examples; polyformer --version."]
    )


def _complain(message: str) -> int:
    print(f"polyformer: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
