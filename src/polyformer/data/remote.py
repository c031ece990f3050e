"""Files that lie elsewhere, by their addresses: s3://bucket/part-*.jsonl.zst, hf://datasets/owner/name/*.parquet.

fsspec opens them, as it does for `datasets`: it reads pieces of a file as they are asked for, and knows some
thirty protocols (s3 by the extra `remote`; hf by huggingface_hub; http, memory and file by itself).
"""

import re
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from polyformer.core.errors import InputError

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://.")

EXTRAS = {"s3": "remote", "s3a": "remote"}
"""By protocol: the extra of this package that installs what reads it."""


@dataclass(frozen=True, eq=False)
class Remote:
    """A file on the file system `system` (fsspec's); it is opened as a `Path` is."""

    system: Any
    path: str
    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.path.rstrip("/").rpartition("/")[2]

    def open(self, mode: str) -> BinaryIO:
        """The file, to be read from any place; only "rb". Whatever goes wrong is an `OSError`."""
        try:
            return cast(BinaryIO, self.system.open(self.path, mode))
        except OSError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise OSError(_reason(error)) from error

    @property
    def bytes(self) -> int:
        """Its size."""
        return int(self.system.size(self.path) or 0)

    @property
    def version(self) -> str:
        """What its file system says of the content: another one where that has changed."""
        return str(self.system.checksum(self.path))


def is_remote(path: str) -> bool:
    """Whether `path` is an address."""
    return _ADDRESS.match(path) is not None


def remote_files(address: str) -> list[Remote]:
    """The files that an address or a pattern of addresses names, in the order of their names; maybe none.

    Raises `InputError` for an unknown protocol, one whose package is missing, and an unreachable system.
    """
    import fsspec

    protocol = address.partition("://")[0]
    try:
        system, root = fsspec.core.url_to_fs(address)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        way = f"pip install 'polyformer[{extra}]'" if extra else f"install it ({error})"
        raise InputError(
            f"{address}: reading {protocol}:// needs a package that is not here: {way}"
        ) from error
    except ValueError as error:
        raise InputError(f"{address}: {_reason(error)}") from error
    try:
        pattern = any(sign in root for sign in "*?[")
        paths = sorted(system.glob(root)) if pattern else [root] if system.exists(root) else []
        return [Remote(system, path, system.unstrip_protocol(path)) for path in paths if system.isfile(path)]
    except Exception as error:
        raise InputError(f"{address}: cannot be reached ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
