"""What a command prints is its own: no progress bars, log messages and warnings of other libraries.

Only the process of a command is changed, never a program that imports polyformer. Variables that the user
sets and Python's option -W take precedence.
"""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from polyformer.core.errors import Caution

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
