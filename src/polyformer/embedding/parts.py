"""The Parquet files that vectors are kept in: parts, each whole or absent, and the one file made of them.

What is in which part follows from the texts alone, not from who computes it or how often it was interrupted:
part i holds the rows i * n to (i + 1) * n. So what several processes write is what one writes, to the byte.
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
from polyformer.core.files import atomic_write, read_json, reading, write_json, writing

if TYPE_CHECKING:
    import pyarrow

MANIFEST, KEY = "_manifest.json", b"polyformer"  # readers of a directory pass over _names
SUFFIX = ".parquet"
Dtype = Literal["float32", "float16"]


@dataclass(frozen=True)
class Parts:
    """The parts of `out`: of a name with the ending .parquet beside it until they are merged, else in it.

    manifest: what the vectors follow from; parts of another one are refused.
    """

    out: Path
    manifest: dict[str, Any]

    @property
    def merges(self) -> bool:
        """Whether the parts become one file."""
        return self.out.suffix == SUFFIX

    @property
    def folder(self) -> Path:
        """Where the parts lie."""
        return self.out.with_name(f"{self.out.name}.parts") if self.merges else self.out

    def begin(self) -> bool:
        """Whether there is anything to do; `InputError` where something else has the name `out`."""
        if self.merges and self.out.exists():
            if not self.out.is_file() or _described(self.out) != self.manifest:
                raise InputError(f"{self.out}: holds something else; choose another --out, or remove it")
            return False
        file = self.folder / MANIFEST
        # Looked at in this order: another process writes the manifest before its parts.
        names = [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        if file.exists():
            self._compare(read_json(file, dict))
        elif any(not name.startswith(".") for name in names):
            raise InputError(f"{self.folder}: holds something else; choose another --out")
        else:
            write_json(file, self.manifest)
        return True

    def _compare(self, before: dict[str, Any]) -> None:
        if before != self.manifest:
            names = [name for name, value in self.manifest.items() if before.get(name) != value]
            raise InputError(
                f"{self.folder}: begun with {'another' if len(names) == 1 else 'other'} "
                f"{', '.join(names) or 'options'}; choose another --out, or remove it"
            )

    def path(self, number: int) -> Path:
        """The file of part `number`."""
        return self.folder / f"part-{number:06}{SUFFIX}"

    def write(self, number: int, columns: "dict[str, pyarrow.Array]") -> None:
        """Write a part, whole or not at all."""
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(columns).replace_schema_metadata({KEY: _encoded(self.manifest)})
        atomic_write(self.path(number), lambda partial: parquet.write_table(table, partial))

    def finish(self, parts: int) -> bool:
        """Merge the `parts`, a row group each, if all are there; whether the whole is there now.

        Of several processes the last to end comes here with all parts there: nobody waits for another, and
        it makes no difference where two come at once.
        """
        if not self.merges:
            return self._there(parts)
        with writing(self.out), FileLock(self.out.with_name(f".{self.out.name}.lock")) as lock:
            if not self.out.exists():
                if not self._there(parts):
                    return False
                atomic_write(self.out, lambda partial: self._merge(parts, partial))
            shutil.rmtree(self.folder, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)
        return True

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
    """[rows, E] as a column of lists of E numbers."""
    import pyarrow

    numbers = pyarrow.array(np.ascontiguousarray(vectors, dtype=dtype).reshape(-1))
    return pyarrow.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])


def id_column(ids: Sequence[int | str]) -> "pyarrow.Array":
    """Integers of 64 bits, or texts."""
    import pyarrow

    try:
        return pyarrow.array(ids, pyarrow.string() if isinstance(ids[0], str) else pyarrow.int64())
    except (pyarrow.ArrowException, OverflowError) as error:
        raise InputError(f"--id: expected integers of 64 bits at most ({quote(str(error))})") from error


def _encoded(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, sort_keys=True).encode()


def _described(path: Path) -> dict[str, Any] | None:
    """The manifest in a Parquet file; None where there is none, or no such file."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_schema(path).metadata or {}
        return json.loads(metadata[KEY])
    except (pyarrow.ArrowException, OSError, KeyError, ValueError):
        return None
