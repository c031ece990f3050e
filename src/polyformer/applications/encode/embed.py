"""Embedding of texts into a file, by one process or several; it can be stopped and resumed at any time.

A process of `world` takes every `world`-th part of the texts and computes the parts that have no file yet.
The processes do not communicate: their results are files, so that none waits, and a run that was stopped can
resume with any number of processes. Each process holds the lock of its rank, so that a second run cannot
repeat its work.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polyformer.applications.encode.encoder import Encoder
from polyformer.applications.encode.parts import Dtype, Parts, id_column, vector_column
from polyformer.applications.encode.texts import TextList, Texts
from polyformer.applications.encode.towers import Pictures, TowerEncoder
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt, check_ranges
from polyformer.training.lock import LOCK, sole_writer

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
