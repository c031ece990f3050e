"""Data sets of the Hugging Face hub, read as a stream: "hub:owner/name", "hub:owner/name:part".

A data set may name its files and images by any path or address. Only those on the hub are read, since others
are files of this machine or servers of its network.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyformer.core.errors import InputError, quote, reason_of
from polyformer.data.image_decoding import read_image
from polyformer.data.images import IMAGE
from polyformer.data.remote import Remote
from polyformer.data.saved_data import Row, plain_row

HUB = "hub:"
_DATA_SETS = "hf://datasets/"


def hub_splits(path: str) -> list[str]:
    """Return the splits of a data set; raises `InputError` if it names files outside of the hub."""
    import datasets

    with _reading_hub(path) as (name, part):
        files = datasets.load_dataset_builder(name, part).config.data_files or {}
        for file in (file for names in files.values() for file in names):
            if not str(file).startswith(_DATA_SETS):
                raise InputError(f"{path}: names the file {quote(str(file))}, which is not on the hub")
        return list(datasets.get_dataset_split_names(name, part))


def hub_rows(path: str, split: str) -> Iterator[Row]:
    """Yield the rows of a split, with the names of classes instead of their numbers."""
    import datasets

    with _reading_hub(path) as (name, part):
        rows = datasets.load_dataset(name, part, split=split, streaming=True)
        stored = rows.decode(False) if rows.features else rows
        features: Any = (rows.features or datasets.Features()).to_dict()
        for row in stored:
            yield plain_row(row, features, lambda image: hub_image(path, image), path)


def hub_image(source: str, path: str) -> bytes:
    """Return the bytes of an image of the data set `source`: a file on the hub, or in a zip file there.

    Raises `InputError` for any other path.
    """
    import fsspec

    *inside, file = path.split("::")
    if not file.startswith(_DATA_SETS) or not all(part.startswith("zip://") for part in inside):
        raise InputError(f"{source}: a row names the image {quote(path)}, which is not on the hub")
    system, root = fsspec.core.url_to_fs(path)
    return bytes(next(read_image(Remote(system, root, path)))[IMAGE])


@contextmanager
def _reading_hub(path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the part of a data set; any failure inside becomes an `InputError`."""
    name, _, part = path.removeprefix(HUB).partition(":")
    try:
        yield name, part or None
    except InputError:
        raise
    except Exception as error:  # network, hub and data sets raise different exceptions
        raise InputError(
            f"{path}: cannot be read from the hub ({reason_of(error)}); check the name and the network, "
            "or download it elsewhere and give the directory of its save_to_disk"
        ) from error
