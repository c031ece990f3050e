"""Embed texts or images: write one vector for each to a Parquet file, computed by a model.

The texts are those of FILES, one text (--file), or the lines of standard input. RUN is a run, a folder of
sentence-transformers, or another checkpoint; a model that does not define its pooling requires --pooling. The
output has the columns id and vector. To resume an interrupted run, repeat the same command. Several processes
(torchrun --nproc-per-node N -m polyformer embed ...) share the work and write the same file. If --out does
not end with .parquet, the parts remain separate files in a directory of that name. A model of texts and
images, such as CLIP, also reads image files and folders of images; the id of an image is its file.
"""

import glob
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyformer.cli.commands.inputs import STANDARD_INPUT, input_lines, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option, refuse
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.applications.embedding import EmbedProgress, TextList, Texts

EXAMPLES = """examples:
  polyformer embed all-MiniLM-L6-v2 notes.txt --out notes.parquet
  polyformer embed all-MiniLM-L6-v2 "reviews/*.jsonl" --column body --id key --with-text --out reviews.parquet
  polyformer embed roberta-base news.csv --pooling mean --dtype float16 --out news.parquet
  polyformer embed clip-vit-base-patch32 photos/ "more/*.jpg" --out photos.parquet
  polyformer embed all-MiniLM-L6-v2 --file letter.txt --out letter.parquet     # the whole file is one text
  torchrun --nproc-per-node 8 -m polyformer embed all-MiniLM-L6-v2 wiki.parquet --out vectors/
"""


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Options of `polyformer embed`."""

    model: str = argument("folder of a run or checkpoint", metavar="RUN")
    files: tuple[str, ...] = argument(
        "text files: .txt (one text per line), .jsonl, .csv, .tsv, .parquet, also with .gz; patterns "
        "(default: every line of standard input)",
        (),
        "FILE",
    )
    file: str | None = text_file("FILE")
    lines: bool = text_lines()
    out: str | None = option(
        ".parquet file to write, or a directory for its parts", metavar="FILE", output="by name"
    )
    column: str | None = option("column of the texts (default: a column with a common name such as text)")
    id: str | None = option(
        "column with the id of a text (default: the row number, from 0)", metavar="COLUMN"
    )
    format: str | None = option("format of FILES, if the names do not show it: text, lines, jsonl, ...")
    pooling: Literal["mean", "first", "last", "max"] | None = option(
        "pooling of the last hidden states (default: as the model's head or folder defines)"
    )
    unnormalized: bool = option("with --pooling: do not normalize vectors to length 1", False)
    max_length: int | None = option("largest number of tokens to read per text (default: the model's limit)")
    prompt_name: str | None = option(
        "prompt of a folder of sentence-transformers, before every text (default: the folder's default)",
        metavar="NAME",
    )
    too_long: Literal["cut", "refuse"] = option("treatment of longer texts (default: cut)", "cut")
    dtype: Literal["float32", "float16"] = option(
        "number format of the vectors (default: float32)", "float32"
    )
    with_text: bool = option("also write the column text", False)
    rows: int = option("rows per part; an interruption loses at most one part (default: 2048)", 2048)
    batch_tokens: int = option("tokens per batch, including padding (default: 4096)", 4096)
    device: Device = device()


def run(options: EmbedOptions) -> None:
    """Write the vectors, or the rest of them after an interruption."""
    import torch

    from polyformer.applications.embedding import OutputFormat, embed
    from polyformer.applications.encoder import Encoder, Pictures, TowerEncoder, has_towers
    from polyformer.core.ops.cpu import model_threads
    from polyformer.training.machine import choose_device, rank, world

    if options.out is None:
        raise InputError("--out is missing; see polyformer embed --help")
    if options.unnormalized and options.pooling is None:
        raise InputError(
            "--unnormalized: requires --pooling; a model with its own head defines whether "
            "vectors are normalized"
        )
    process, processes = rank(), world()
    place = choose_device(options.device)
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    form = OutputFormat(
        dtype=options.dtype, with_text=options.with_text, rows=options.rows, too_long=options.too_long
    )
    if has_towers(Path(options.model)):
        refuse(options, ("pooling", "unnormalized", "max_length", "prompt_name"), "the model defines it")
        pictures = Pictures.of(options.files)
        texts = pictures or texts_of(options, processes)
        encoder = TowerEncoder(Path(options.model), place, images=pictures is not None)
    else:
        texts = texts_of(options, processes)
        encoder = Encoder(
            Path(options.model),
            place,
            options.pooling,
            normalize=not options.unnormalized,
            max_length=options.max_length,
            batch_tokens=options.batch_tokens,
            prompt_name=options.prompt_name,
        )
    with model_threads(encoder.model):
        progress = embed(
            encoder,
            texts,
            Path(options.out),
            form,
            rank=process,
            world=processes,
            report=report if process == 0 else lambda progress: None,
        )
    conclude(progress, options, process, processes)


def texts_of(options: EmbedOptions, world: int) -> "Texts | TextList":
    """Return the texts of FILES, of --file or of standard input, for one of `world` processes."""
    from polyformer.applications.embedding import TextList, Texts

    if options.files:
        refuse(options, ("file", "lines"), "not available with FILE; leave out one of them")
        refuse_texts(options.files)
        return Texts(files=options.files, column=options.column, id=options.id, format=options.format)
    refuse(options, ("column", "id", "format"), "requires FILE, whose columns or format it names")
    if options.file is None or options.file == STANDARD_INPUT:
        check_standard_input(options, world)
    elif options.lines:
        return Texts(files=(options.file,), format="lines")  # read lazily, as a file may be large
    batches = input_lines((), options.file, options.lines)
    return TextList(name=options.file or "standard input", texts=tuple(itertools.chain(*batches)))


def check_standard_input(options: EmbedOptions, world: int) -> None:
    """Raise `InputError` if standard input is a terminal, or shared by several processes."""
    if world > 1:
        raise InputError(
            "FILE is missing: several processes cannot share standard input; save its texts in a file"
        )
    if options.file is None and sys.stdin.isatty():
        raise InputError(
            "FILE is missing: name files of texts, --file PATH, or write lines to standard input"
        )


def refuse_texts(files: tuple[str, ...]) -> None:
    """Raise `InputError` for a text in the place of a file: words that name no file."""
    from polyformer.data.sources.files import is_remote
    from polyformer.data.sources.origins import parallel_files

    for file in files:
        if len(file.split()) < 2 or is_remote(file) or parallel_files(file):
            continue
        if not os.path.exists(file) and not glob.glob(file, recursive=True):
            raise InputError(
                f"FILE: expected the name of a file, got a text, {quote(file)}; write the text to standard "
                "input, with --file -"
            )


def conclude(progress: "EmbedProgress", options: EmbedOptions, rank: int, world: int) -> None:
    """Print the result of this process."""
    prefix = f"process {rank + 1} of {world}: " if world > 1 else ""
    if progress.cut:
        print(f"polyformer: {prefix}{progress.cut:,} texts were too long and were truncated", file=sys.stderr)
    if progress.complete:
        print(f"{options.out}: complete; {prefix}{progress.computed:,} texts embedded in this run")
    else:
        print(
            f"{options.out}: {prefix}{progress.computed:,} texts embedded; other processes are still running"
        )


def report(progress: "EmbedProgress") -> None:
    """Print the progress of the first process on standard error."""
    speed = progress.computed / progress.seconds if progress.seconds else 0.0
    print(f"{progress.rows:,} texts, {speed:,.0f} texts/s", file=sys.stderr)
