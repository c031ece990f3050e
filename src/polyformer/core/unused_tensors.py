"""Unused tensors of a public checkpoint, stored next to a model so that none is lost.

Some classes of transformers have parameters that they never compute with (a pooler below a head that pools
nothing). Models here do not have them; the tensors are stored unchanged, by name, and exports to transformers
contain them again.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyformer.core.files import read_tensors, write_tensors

FILE = "unread.safetensors"


def read_unused_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the unused tensors in a model's directory in this library's format."""
    return read_tensors(folder / FILE) if (folder / FILE).is_file() else {}


def write_unused_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the tensors to `folder`; without tensors remove the file of an earlier model."""
    if tensors:
        write_tensors(folder / FILE, tensors)
    else:
        (folder / FILE).unlink(missing_ok=True)
