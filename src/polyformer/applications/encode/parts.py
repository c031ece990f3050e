"""The Parquet files of vectors: parts, each complete or absent, and the merged file.

The content of a part depends only on the texts, not on the process that computes it or on interruptions: part
i contains the rows i * n to (i + 1) * n. So several processes write byte for byte the same as one process.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock

from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, read_json, reading, write_json, write_output, writing
from polyformer.core.paths import check_file, check_folder, is_replaceable

if TYPE_CHECKING:
    import pyarrow

MANIFEST, KEY = "_manifest.json", b"polyformer"  # readers of a directory skip names that begin with _
SUFFIX = ".parquet"
Dtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class Parts:
    """The parts of `out`: in that folder, or next to it until they are merged into a file .parquet.

    manifest: everything that determines the vectors; parts with another manifest are rejected.
    """

    out: Path
    manifest: dict[str, Any]

    @property
    def merges(self) -> bool:
        """Return whether the parts are merged into one file."""
        return self.out.suffix == SUFFIX

    @property
    def folder(self) -> Path:
        """Return the folder of the parts."""
        return self.out.with_name(f"{self.out.name}.parts") if self.merges else self.out

    def is_complete(self) -> bool:
        """Return whether all work is done; raise `InputError` if `out` has other content."""
        if self.merges:
            check_file(self.out, "--out")
        else:
            check_folder(self.out, "--out")
        if self.merges and self.out.exists() and is_replaceable(self.out):
            if _described(self.out) != self.manifest:
                raise InputError(f"{self.out}: contains something else; choose another --out, or remove it")
            return True
        file = self.folder / MANIFEST
        # The order matters: another process writes the manifest before its parts.
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if file.exists():
            self._compare(read_json(file, dict))
        elif any(not name.startswith(".") for name in names):
            raise InputError(f"{self.folder}: contains something else; choose another --out")
        return False

    def begin(self) -> bool:
        """Prepare the folder; return whether any work remains. Raises `InputError` like `is_complete`."""
        if self.is_complete():
            self._clear()  # another process has finished meanwhile; the lock created the folder
            return False
        if not (self.folder / MANIFEST).exists():
            write_json(self.folder / MANIFEST, self.manifest)
        return True

    def _compare(self, before: dict[str, Any]) -> None:
        if before != self.manifest:
            names = [name for name, value in self.manifest.items() if before.get(name) != value]
            raise InputError(
                f"{self.folder}: started with {'another' if len(names) == 1 else 'other'} "
                f"{', '.join(names) or 'options'}; choose another --out, or remove it"
            )

    def path(self, number: int) -> Path:
        """Return the file of part `number`."""
        return self.folder / f"part-{number:06}{SUFFIX}"

    def write(self, number: int, columns: "dict[str, pyarrow.Array]") -> None:
        """Write a part atomically."""
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(columns).replace_schema_metadata({KEY: _encoded(self.manifest)})
        atomic_write(self.path(number), lambda partial: parquet.write_table(table, partial))

    def finish(self, parts: int) -> bool:
        """Merge the `parts`, one row group each, if all exist; return whether the result is complete now.

        No process waits for another: the last of several processes to end finds all parts. It is safe if two
        processes arrive at once.
        """
        if not self.merges:
            return self._there(parts)
        with writing(self.out), FileLock(self.out.with_name(f".{self.out.name}.lock")) as lock:
            if not self.out.exists() or not is_replaceable(self.out):
                if not self._there(parts):
                    return False
                write_output(self.out, lambda partial: self._merge(parts, partial))
            self._clear()
            Path(lock.lock_file).unlink(missing_ok=True)
        return True

    def _clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _there(self, parts: int) -> bool:
        return all(self.path(number).is_file() for number in range(parts))

    def _merge(self, parts: int, partial: Path) -> None:
        from pyarrow import parquet

        with reading(self.path(0)):
            schema = parquet.read_schema(self.path(0))
        with parquet.ParquetWriter(partial, schema) as writer:
            for number in range(parts):
                writer.write_table(parquet.read_table(self.path(number)))


def vector_column(vectors: np.ndarray, dtype: Dtype) -> "pyarrow.Array":
    """Return [rows, E] as a column of lists of E numbers."""
    import pyarrow

    numbers = pyarrow.array(np.ascontiguousarray(vectors, dtype=dtype).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])


def id_column(ids: Sequence[int | str]) -> "pyarrow.Array":
    """Return a column of 64-bit integers or of texts."""
    import pyarrow

    try:
        return pyarrow.array(ids, pyarrow.string() if isinstance(ids[0], str) else pyarrow.int64())
    except (pyarrow.ArrowException, OverflowError) as error:
        raise InputError(f"--id: expected integers of 64 bits at most ({quote(str(error))})") from error


def _encoded(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def _described(path: Path) -> dict[str, Any] | None:
    """Return the manifest in a Parquet file; None if the file or its manifest does not exist."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_schema(path).metadata or {}
        return json.loads(metadata[KEY])
    except (pyarrow.ArrowException, OSError, KeyError, ValueError):
        return None
