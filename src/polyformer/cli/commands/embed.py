"""Embed texts: write a vector for each text of FILES to a Parquet file, with a sentence encoder.

MODEL is a run, a folder of sentence-transformers or another checkpoint. If it does not define how texts
become vectors, use --pooling. The file has the columns id and vector. If the command is stopped, the same
command resumes it. Several processes (torchrun --nproc-per-node N -m polyformer embed ...) share the work and
write the same file. If --out does not end in .parquet, the parts stay as files in a directory of that name.
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
class Options:
    """What `polyformer embed` takes."""

    model: str = argument("folder of a run or of a checkpoint", metavar="RUN")
    files: tuple[str, ...] = argument(
        "files of texts: .txt (a text in each line), .jsonl, .csv, .tsv, .parquet, also with .gz; patterns",
        metavar="FILE",
    )
    out: str | None = option(
        ".parquet file to write, or a directory for its parts", metavar="FILE", output="by name"
    )
    column: str | None = option("column with the texts (default: a column with a usual name, such as text)")
    id: str | None = option("column with the id of a text (default: its number, from 0)", metavar="COLUMN")
    format: str | None = option("format of FILES if their names do not show it: text, lines, jsonl, ...")
    pooling: Literal["mean", "first", "last", "max"] | None = option(
        "pooling of the last hidden states (default: from the model's head or folder)"
    )
    unnormalized: bool = option("with --pooling: do not scale vectors to length 1", False)
    max_length: int | None = option("maximum tokens per text (default: the maximum of the model)")
    too_long: Literal["cut", "refuse"] = option("action for longer texts (default: cut)", "cut")
    dtype: Literal["float32", "float16"] = option("data type of the vectors (default: float32)", "float32")
    with_text: bool = option("also write the texts", False)
    rows: int = option("texts in a part, which is computed or lost as a whole (default: 2048)", 2048)
    batch_tokens: int = option("tokens per batch, including padding (default: 4096)", 4096)
    device: Device = device()


def run(options: Options) -> None:
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


def conclude(progress: "Progress", options: Options, rank: int, world: int) -> None:
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
