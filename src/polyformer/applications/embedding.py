"""Vectors of many texts in a Parquet file, by one process or several; stopped at any time, and resumed.

Parts are files, each complete or absent. Part i contains the rows i * n to (i + 1) * n, and its content
depends only on the texts, not on the process that computes it or on interruptions. So several processes write
byte for byte the same as one process.

A process of `world` takes every `world`-th part of the texts and computes the parts that have no file yet.
The processes do not communicate: their results are files, so that none waits, and a run that was stopped can
resume with any number of processes. Each process holds the lock of its rank, so that a second run cannot
repeat its work.
"""

import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from filelock import FileLock

from polyformer.applications.encoder import Encoder, Pictures, TowerEncoder
from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, read_json, reading, write_json, write_output, writing
from polyformer.core.paths import check_file, check_folder, is_replaceable
from polyformer.core.ranges import PositiveInt, check_ranges
from polyformer.data import DataConfig
from polyformer.data.formats.columns import roles
from polyformer.data.formats.readers import Row
from polyformer.data.sources.checks import fingerprint
from polyformer.data.sources.origins import open_source
from polyformer.training.run_control import LOCK, sole_writer

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of `files` (source names as in `polyformer.data.sources.origins`), in order, read lazily.

    column: the column of the text; None: the column with a usual name, or the only column. id: the column of
    the identifier, texts or integers; None: rows are numbered from 0 across all files. format: of all files;
    None: inferred from their names, where a .txt has one text per line.
    """

    files: tuple[str, ...]
    column: str | None = None
    id: str | None = None
    format: str | None = None

    @property
    def name(self) -> str:
        """Return the name of the texts in messages."""
        return ", ".join(self.files)

    def rows(self) -> Iterator[tuple[int | str, str]]:
        """Yield the id and the text of every row; an `InputError` names the file and the row without them."""
        number, kind = 0, None
        for file in self.files:
            for row_number, row in enumerate(open_source(file, "train", self._format(file)), 1):
                where = f"{file}, row {row_number}"
                text = self._text(row, where)
                name = number if self.id is None else _value(row, self.id, where, "--id")
                if isinstance(name, bool) or not isinstance(name, int | str):
                    raise InputError(
                        f"{where}: --id {self.id}: expected a text or an integer, got {quote(name)}"
                    )
                kind = kind or type(name)
                if type(name) is not kind:
                    raise InputError(
                        f"{where}: --id {self.id}: {quote(name)} is of another type than in the rows before"
                    )
                yield name, text
                number += 1

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that describes the rows: equal for equal files that are read alike."""
        prints = [
            {name: about[name] for name in ("bytes", "sha256")}
            for file in self.files
            for about in fingerprint(DataConfig(path=file, format=self._format(file)), ("text",))["path"]  # type: ignore[arg-type]
        ]
        return {"files": prints, "column": self.column, "id": self.id, "format": self.format}

    def _format(self, file: str) -> str | None:
        plain = Path(file.removesuffix(".gz")).suffix.lower() == ".txt"
        return self.format or ("lines" if plain else None)

    def _text(self, row: Row, where: str) -> str:
        if self.column is not None:
            text = _value(row, self.column, where, "--column")
        else:
            known = roles(list(row), "lm")
            texts = [name for name, value in row.items() if isinstance(value, str) and name != self.id]
            names = [known[1]["text"]] if known else texts
            if len(names) != 1:
                raise InputError(
                    f"{where}: which of {', '.join(map(quote, row)) or 'no columns'} is the text? "
                    "Say it by --column NAME"
                )
            text = row[names[0]]
        if not isinstance(text, str):
            raise InputError(f"{where}: expected a text, got {quote(text)}")
        return text


@dataclass(frozen=True, kw_only=True)
class TextList:
    """Texts in memory, numbered from 0, such as those of standard input.

    name: the name of the texts in messages.
    """

    name: str
    texts: tuple[str, ...]

    def rows(self) -> Iterator[tuple[int, str]]:
        """Yield the number of every text and the text."""
        return iter(enumerate(self.texts))

    def fingerprint(self) -> dict[str, Any]:
        """Return plain data that describes the texts: equal for equal texts."""
        content = json.dumps(self.texts).encode()
        return {"texts": len(self.texts), "sha256": hashlib.sha256(content).hexdigest()}


def _value(row: Row, column: str, where: str, flag: str) -> Any:
    if column not in row:
        names = ", ".join(map(quote, row)) or "none"
        raise InputError(f"{where}: no column {quote(column)}, which {flag} names; it has {names}")
    return row[column]


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


REPORT_SECONDS = 5.0

Rows = list[tuple[int | str, str]]


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """Options of the output: number type, a column with the text, rows per part, treatment of long texts."""

    dtype: Dtype = "float32"
    with_text: bool = False
    rows: PositiveInt = 2048
    too_long: Literal["cut", "refuse"] = "cut"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass
class EmbedProgress:
    """The progress of this process."""

    rows: int = 0  # in total
    computed: int = 0  # now
    cut: int = 0  # truncated texts
    seconds: float = 0.0
    complete: bool = False  # all vectors exist, including the parts of other processes


def embed(
    encoder: Encoder | TowerEncoder,
    texts: Texts | TextList | Pictures,
    out: Path,
    form: OutputFormat = OutputFormat(),
    *,
    rank: int = 0,
    world: int = 1,
    report: Callable[[EmbedProgress], None] = lambda progress: None,
) -> EmbedProgress:
    """Write the vectors of `texts` to `out`, a file .parquet, or a directory of parts.

    Columns: id, vector (a list of E numbers) and optionally text. Only the rows of one part are in memory.

    Raises:
        InputError: no texts, a row without a text, other vectors in `out`, a full disk, or another process
            with the same output and rank. Parts that were written are kept and reused by the next run.
    """
    progress = EmbedProgress()
    manifest = {
        **encoder.fingerprint,
        **{"texts": texts.fingerprint(), "dtype": form.dtype, "with_text": form.with_text},
        **{"rows": form.rows, "too_long": form.too_long},
    }
    parts = Parts(out, manifest)
    if parts.is_complete():
        progress.complete = True
        return progress
    with sole_writer(parts.folder, "the same command continues it", f"{LOCK}-{rank}", kept=False):
        if not parts.begin():
            progress.complete = True
            return progress
        start = reported = time.monotonic()
        number = -1
        for number, rows in enumerate(_portions(texts.rows(), form.rows)):
            if number % world != rank:
                continue
            progress.rows += len(rows)
            if not parts.path(number).is_file():
                parts.write(number, _columns(encoder, rows, form, progress))
                progress.computed += len(rows)
            progress.seconds = time.monotonic() - start
            if time.monotonic() - reported > REPORT_SECONDS:
                report(progress)
                reported = time.monotonic()
        if number < 0:
            raise InputError(f"{texts.name}: empty; there is no text to embed")
        progress.complete = parts.finish(number + 1)
    return progress


def _portions(rows: Iterator[tuple[int | str, str]], size: int) -> Iterator[Rows]:
    while portion := list(itertools.islice(rows, size)):
        yield portion


def _columns(
    encoder: Encoder | TowerEncoder, rows: Rows, form: OutputFormat, progress: EmbedProgress
) -> dict[str, Any]:
    ids, texts = [name for name, _ in rows], [text for _, text in rows]
    vectors, cut = encoder.vectors(texts)
    if cut and form.too_long == "refuse":
        raise InputError(
            f"the text {quote(ids[cut[0]])} has more than the maximum of {encoder.max_length} tokens; "
            "shorten it, or leave out --too-long refuse to truncate long texts"
        )
    progress.cut += len(cut)
    columns = {"id": id_column(ids), "vector": vector_column(vectors.numpy(), form.dtype)}
    return {**columns, "text": id_column(texts)} if form.with_text else columns
