"""Remote files by their addresses: s3://bucket/part-*.jsonl.zst, hf://datasets/owner/name/*.parquet.

fsspec opens them, as in `datasets`: it reads parts of a file on demand, and supports some thirty protocols
(s3 by the extra `remote`; hf by huggingface_hub; http, memory and file without extras).
"""

import re
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from polyformer.core.errors import InputError, reason_of

_ADDRESS = re.compile(r"[a-z][a-z0-9+]*://.")

EXTRAS = {"s3": "remote", "s3a": "remote"}
"""By protocol: the extra of this package that installs its reader."""


@dataclass(frozen=True, eq=False)
class Remote:
    """A file on fsspec's file system `system`; it is opened like a `Path`."""

    system: Any
    path: str
    address: str

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return self.path.rstrip("/").rpartition("/")[2]

    def open(self, mode: str) -> BinaryIO:
        """Open the file with random access; only "rb". All errors are `OSError`."""
        try:
            return cast(BinaryIO, self.system.open(self.path, mode))
        except OSError:
            raise
        except Exception as error:  # every file system raises different exceptions
            raise OSError(reason_of(error)) from error

    @property
    def bytes(self) -> int:
        """Return its size."""
        return int(self.system.size(self.path) or 0)

    @property
    def version(self) -> str:
        """Return the file system's identifier of the content, which changes with the content."""
        return str(self.system.checksum(self.path))


def is_remote(path: str) -> bool:
    """Return whether `path` is an address."""
    return _ADDRESS.match(path) is not None


def remote_files(address: str) -> list[Remote]:
    """Return the files that match an address or pattern, in the order of their names; maybe none.

    Raises `InputError` for an unknown protocol, a missing package, or an unreachable system.
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
        raise InputError(f"{address}: {reason_of(error)}") from error
    try:
        pattern = any(sign in root for sign in "*?[")
        paths = sorted(system.glob(root)) if pattern else [root] if system.exists(root) else []
        return [Remote(system, path, system.unstrip_protocol(path)) for path in paths if system.isfile(path)]
    except Exception as error:
        raise InputError(f"{address}: cannot be reached ({reason_of(error)})") from error
