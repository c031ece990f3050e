"""Tensors of a public checkpoint that no number depends on: kept beside a model, so that none is lost.

Some of transformers' classes have parameters that they never compute with (a pooler below a head that pools
nothing). A model has no place for them; it keeps them as they are, by their names, and what is saved for
transformers holds them again.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyformer.core.files import read_tensors, write_tensors

UNREAD = "unread.safetensors"


def read_unread(folder: Path) -> dict[str, Tensor]:
    """Those of a model's directory in our format."""
    return read_tensors(folder / UNREAD) if (folder / UNREAD).is_file() else {}


def write_unread(unread: Mapping[str, Tensor], folder: Path) -> None:
    """The reverse; a file that an earlier model left there goes."""
    if unread:
        write_tensors(folder / UNREAD, unread)
    else:
        (folder / UNREAD).unlink(missing_ok=True)
