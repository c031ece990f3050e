"""Tensors of a public checkpoint that no number depends on: kept beside a model, so that none is lost.

Some of transformers' classes have parameters that they never compute with (a pooler below a head that pools
nothing). A model has no place for them; it keeps them as they are, by their names, and what is saved for
transformers holds them again.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyformer.core.files import read_tensors, write_tensors

FILE = "unread.safetensors"


def read_unused_tensors(folder: Path) -> dict[str, Tensor]:
    """Those of a model's directory in our format."""
    return read_tensors(folder / FILE) if (folder / FILE).is_file() else {}


def write_unused_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """The reverse; a file that an earlier model left there goes."""
    if tensors:
        write_tensors(folder / FILE, tensors)
    else:
        (folder / FILE).unlink(missing_ok=True)
