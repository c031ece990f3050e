"""A sentence encoder reads whole documents: does a passage find the document that it was taken from?

A checkpoint that embeds (mean of the tokens, say) reads each document cut to `short` tokens, and, converted
to `long` positions, up to so many, with dense attention and with each of the `attentions`, without training.
A passage of `passage` tokens is taken out of each document, at a random place, and the documents are ranked
by the cosine with its vector. Beside them stands what needs no conversion, the mean over pieces of `short`.

The claim (Beltagy et al. 2020, section 5; Reimers and Gurevych 2019): a longer text finds more. The rule,
written before it was run: the mean reciprocal rank of the last of `attentions` is above that of the cut
documents, and at least `KEPT` of that of dense attention at the same length.

Documents are the chapters of a book, or the longest reviews of a labelled set (label, rating, text).
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyformer.bench.claims import fields_of, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.timing import stopwatch
from polyformer.checkpoints import convert, from_pretrained
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.opening import opened
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.heads import EmbedConfig
from polyformer.model import Transformer
from polyformer.training.config import at_least

KEPT = 0.95
"""Of dense attention's mean reciprocal rank."""

CHAPTER = re.compile(r"^CHAPTER [IVXLC\d]+\.?\s*$", re.MULTILINE)

REVIEWS = ("label", "rating", "text")


EXPERIMENT = Experiment(
    sources={"data": "book", "model": "encoder"},
    quick={"documents": 2, "short": 16, "long": 32, "passage": 8, "attentions": ("Window(4)",)},
    claims=(
        Claim(
            name="long-documents",
            says="a passage finds its document better where more of it is read",
            paper="Beltagy et al. 2020 (Longformer); Reimers and Gurevych 2019",
            section="section 5; section 3",
            published="tasks on documents gain from text beyond 512 tokens",
            measured="mean reciprocal rank of the chapter that a passage was cut out of, without training",
            scale="all-MiniLM-L6-v2, 120 chapters of 2,137 to 5,391 tokens read to 256 or 4,096",
            rule="a window with a global token is above cut documents, and at least 0.95 of dense attention",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongDocumentsClaim(Config):
    """The checkpoint, the documents, and sizes."""

    model: str  # the folder of an encoder of sentences
    data: str  # the file of a book with chapters, or a .tsv of reviews
    documents: int = 120
    short: int = 256  # tokens
    long: int = 4096
    passage: int = 64
    attentions: tuple[str, ...] = ("Window(128)", "Window(128) | Global(1)")
    seed: int = 0
    out: str = "runs/long-documents"

    def __post_init__(self) -> None:
        at_least(2, documents=self.documents)
        at_least(8, passage=self.passage, short=self.short)
        at_least(self.short, long=self.long)
        if not self.attentions:
            raise InputError("attentions: expected a pattern or several, got none")


@dataclasses.dataclass(frozen=True)
class Ranking:
    """first, tenth: share of the passages whose document is the first, or among the first ten. reciprocal:
    the mean of 1 / rank. seconds: to embed the documents."""

    first: float
    tenth: float
    reciprocal: float
    seconds: float


def run(config: LongDocumentsClaim) -> dict[str, Ranking]:
    """Embed and rank all; write OUT/long-documents.csv, print a table and the verdict."""
    torch.manual_seed(config.seed)
    model, tokenizer = encoder(config.model).eval(), load_tokenizer(config.model)
    frame = (
        [x for x in (tokenizer.cls_id,) if x is not None],
        [x for x in (tokenizer.sep_id,) if x is not None],
    )
    rows = [tokenizer.encode(text) for text in texts_of(config)]
    rows = sorted((ids for ids in rows if len(ids) >= 2 * config.short), key=len)[-config.documents :]
    if len(rows) < 2:
        raise InputError(
            f"data: expected two documents or more of {2 * config.short} tokens, got {len(rows)}; take a "
            "smaller --short, or other documents"
        )
    passages, rest = cut_out(rows, config.passage, config.seed)
    longer, _ = convert(model, max_positions=max(config.long, model.config.max_position_embeddings))
    queries = vectors(model, passages, frame, config.short)
    results: dict[str, Ranking] = {}

    def add(name: str, embedded: Tensor, seconds: float) -> None:
        results[name] = ranked(queries, embedded, seconds)
        print(line(name, results[name]), flush=True)

    lengths = [len(ids) for ids in rest]
    print(
        f"{len(rest)} documents of {min(lengths):,} to {max(lengths):,} tokens (mean {np.mean(lengths):,.0f})"
    )
    add(cut(config), *timed(model, rest, frame, config.short))
    add(pieces_of(config), *timed(model, rest, frame, config.short, whole=True))
    add(dense(config), *timed(longer, rest, frame, config.long))
    for name in config.attentions:
        add(f"{name}, {config.long}", *timed(convert(longer, name)[0], rest, frame, config.long))
    cells = ((name, *dataclasses.astuple(ranking)) for name, ranking in results.items())
    write_csv(Path(config.out) / "long-documents.csv", ("documents", *fields_of(Ranking)), cells)
    conclude(EXPERIMENT, config, [verdict(config, results)])
    return results


def encoder(folder: str) -> Transformer:
    """The checkpoint as one that embeds: a folder of sentence-transformers is a bare encoder until asked."""
    model = from_pretrained(folder)
    return model if isinstance(model.config.head, EmbedConfig) else from_pretrained(folder, "embed")


def cut(config: LongDocumentsClaim) -> str:
    """What the row of cut documents is called."""
    return f"cut at {config.short}"


def pieces_of(config: LongDocumentsClaim) -> str:
    """What the row of means over pieces is called."""
    return f"mean of pieces of {config.short}"


def dense(config: LongDocumentsClaim) -> str:
    """What the row of dense attention is called."""
    return f"dense, {config.long}"


def texts_of(config: LongDocumentsClaim) -> list[str]:
    """Chapters of a book, or reviews."""
    path = Path(config.data)
    if not path.is_file():
        raise InputError(f"data: {config.data}: no such file; expected a book or a .tsv of reviews")
    if ".tsv" in path.suffixes:
        return [
            str(dict(row)["text"])
            for row in read(DataConfig(format="tsv", header=REVIEWS), ("text",), str(path))
        ]
    with opened(path) as file:
        return CHAPTER.split(file.read().replace("\r\n", "\n"))[1:]


def cut_out(rows: Sequence[list[int]], length: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """A passage of each document, at a random place, and the documents without it."""
    generator = np.random.default_rng(seed)
    places = [int(generator.integers(len(ids) - length)) for ids in rows]
    passages = [ids[start : start + length] for ids, start in zip(rows, places)]
    return passages, [ids[:start] + ids[start + length :] for ids, start in zip(rows, places)]


@torch.no_grad()
def vectors(
    model: Transformer,
    rows: Sequence[list[int]],
    frame: tuple[list[int], list[int]],
    length: int,
    whole: bool = False,
) -> Tensor:
    """A vector of each text [n, E], cut to `length` tokens; with `whole` the mean over its pieces."""
    first, last = frame
    step, embedded = length - len(first) - len(last), []
    for ids in rows:
        starts = range(0, len(ids), step) if whole else (0,)
        pieces = [torch.tensor([[*first, *ids[start : start + step], *last]]) for start in starts]
        embedded.append(torch.cat([model(piece).logits for piece in pieces]).mean(0))
    return torch.stack(embedded)


def timed(
    model: Transformer,
    rows: Sequence[list[int]],
    frame: tuple[list[int], list[int]],
    length: int,
    whole: bool = False,
) -> tuple[Tensor, float]:
    """`vectors`, and the seconds that they took."""
    embedded: list[Tensor] = []
    seconds = stopwatch(lambda: embedded.append(vectors(model, rows, frame, length, whole)))
    return embedded[0], seconds


def ranked(queries: Tensor, documents: Tensor, seconds: float) -> Ranking:
    """Query i looks for document i, by their cosine."""
    scores = (
        torch.nn.functional.normalize(queries, dim=-1) @ torch.nn.functional.normalize(documents, dim=-1).T
    )
    ranks = (scores > scores.diagonal()[:, None]).sum(1) + 1
    share = [float((ranks <= most).double().mean()) for most in (1, 10)]
    return Ranking(share[0], share[1], float((1 / ranks.double()).mean()), seconds)


def line(name: str, ranking: Ranking) -> str:
    """A row of the table."""
    return (
        f"{name:<32}first {ranking.first:.3f}  among ten {ranking.tenth:.3f}  mean reciprocal rank "
        f"{ranking.reciprocal:.3f}  {ranking.seconds:7.1f} s"
    )


def verdict(config: LongDocumentsClaim, results: dict[str, Ranking]) -> Verdict:
    """What the figures say of the claim."""
    sparse = results[f"{config.attentions[-1]}, {config.long}"].reciprocal
    short, full = results[cut(config)].reciprocal, results[dense(config)].reciprocal
    pieces = results[pieces_of(config)].reciprocal
    holds = sparse > short and sparse >= KEPT * full
    said = "reproduced" if holds else "differs from the paper"
    return verdict_of(
        holds,
        f"a passage finds its document better where more of it is read: {said} (mean reciprocal rank "
        f"{sparse:.3f}, cut {short:.3f}, dense {full:.3f}; mean of pieces {pieces:.3f})",
    )
