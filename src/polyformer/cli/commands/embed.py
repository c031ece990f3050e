"""Embed texts: write a vector for each text of FILES to a Parquet file, by a sentence encoder.

MODEL is a run, a folder of sentence-transformers or another checkpoint; one that does not say how its texts
become vectors takes --pooling. The file has the columns id and vector. What was stopped goes on by the same
command; several processes (torchrun --nproc-per-node N -m polyformer embed ...) share the work and write the
same file. With a --out that does not end in .parquet the parts stay as files in a directory of that name.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyformer.cli.commands.options import Device, argument, device, option

if TYPE_CHECKING:
    from polyformer.applications.encode.embed import Progress

EXAMPLES = """examples:
  polyformer embed all-MiniLM-L6-v2 notes.txt --out notes.parquet
  polyformer embed all-MiniLM-L6-v2 "reviews/*.jsonl" --column body --id key --with-text --out reviews.parquet
  polyformer embed roberta-base news.csv --pooling mean --dtype float16 --out news.parquet
  torchrun --nproc-per-node 8 -m polyformer embed all-MiniLM-L6-v2 wiki.parquet --out vectors/
"""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Options of `polyformer embed`."""

    model: str = argument("folder of a run or of a checkpoint", metavar="RUN")
    files: tuple[str, ...] = argument(
        "files of texts: .txt (a text in each line), .jsonl, .csv, .tsv, .parquet, also with .gz; patterns",
        metavar="FILE",
    )
    out: str | None = option(
        "the file .parquet to write, or a directory for its parts", metavar="FILE", output="by name"
    )
    column: str | None = option("column of the texts (default: one with a usual name, such as text)")
    id: str | None = option("column that names a text (default: its number, from 0)", metavar="COLUMN")
    format: str | None = option("of FILES, if their names do not say: text, lines, jsonl, ...")
    pooling: Literal["mean", "first", "last", "max"] | None = option(
        "make the vector of the last hidden states so (default: as the model's head or folder says)"
    )
    unnormalized: bool = option("with --pooling: do not scale vectors to length 1", False)
    max_length: int | None = option("tokens of a text that are read (default: as many as the model takes)")
    too_long: Literal["cut", "refuse"] = option("what is done with a longer text (default: cut)", "cut")
    dtype: Literal["float32", "float16"] = option("of the numbers (default: float32)", "float32")
    with_text: bool = option("keep the text beside its vector", False)
    rows: int = option("in a part, which is computed or lost as a whole (default: 2048)", 2048)
    batch_tokens: int = option("tokens that are computed at once, padding included (default: 4096)", 4096)
    device: Device = device()


def run(options: EmbedOptions) -> None:
    """Write the vectors, or what is left of them."""
    import torch

    from polyformer.applications.encode.embed import Form, embed
    from polyformer.applications.encode.encoder import Encoder
    from polyformer.applications.encode.texts import Texts
    from polyformer.core import launcher
    from polyformer.core.errors import InputError
    from polyformer.core.ops.workers import suited
    from polyformer.training.recipes.run import choose_device

    if options.out is None:
        raise InputError("--out is missing; see polyformer embed --help")
    if options.unnormalized and options.pooling is None:
        raise InputError("--unnormalized: goes with --pooling; a model's own head says whether it scales")
    rank, world = launcher.rank(), launcher.world()
    place = choose_device(options.device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    form = Form(
        dtype=options.dtype, with_text=options.with_text, rows=options.rows, too_long=options.too_long
    )
    texts = Texts(files=options.files, column=options.column, id=options.id, format=options.format)
    encoder = Encoder(
        Path(options.model),
        place,
        options.pooling,
        normalize=not options.unnormalized,
        max_length=options.max_length,
        batch_tokens=options.batch_tokens,
    )
    with suited(encoder.model):
        progress = embed(
            encoder,
            texts,
            Path(options.out),
            form,
            rank=rank,
            world=world,
            report=report if rank == 0 else lambda progress: None,
        )
    conclude(progress, options, rank, world)


def conclude(progress: "Progress", options: EmbedOptions, rank: int, world: int) -> None:
    """Say what there is now, in the words of one process of several."""
    who = f"process {rank + 1} of {world}: " if world > 1 else ""
    if progress.cut:
        print(f"polyformer: {who}{progress.cut:,} texts were longer than is read, and cut", file=sys.stderr)
    if progress.whole:
        print(f"{options.out}: whole; {who}{progress.computed:,} texts embedded now")
    else:
        print(f"{options.out}: {who}{progress.computed:,} texts embedded; other processes have not ended yet")


def report(progress: "Progress") -> None:
    """How far the first process is, on standard error."""
    speed = progress.computed / progress.seconds if progress.seconds else 0.0
    print(f"{progress.rows:,} texts, {speed:,.0f} a second", file=sys.stderr)
