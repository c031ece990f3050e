"""What claims about memories share: the text, the decoder that reads it in order, and its perplexity."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch

from polyformer.bench.claims import decoder_options, wikitext
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.data import DataConfig, read
from polyformer.data.opening import opened
from polyformer.recipes.fit import Fitted
from polyformer.tasks import LanguageModelling
from polyformer.training.config import at_least

CHARACTERS = 8
"""Of a token, at most, in the mean."""

HELD_OUT = 20
"""Of a book the last twentieth is held out."""

BOOK = re.compile(r"^\*\*\* ?START OF [^\n]*\n(.*?)^\*\*\* ?END OF ", re.DOTALL | re.MULTILINE)
"""Project Gutenberg's own text stands before and after these lines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InOrderClaim(Config):
    """The text and the decoder of a claim.

    data: a directory with WikiText-2's {train,valid}.txt[.gz], or the file of a book; by default the default
    text.
    """

    data: str | None = None
    length: int = 32  # tokens in a segment
    held_out: int = 50_000  # tokens evaluated on, in whole documents
    batch_tokens: int = 1024
    layers: int = 3
    width: int = 96
    heads: int = 4
    vocabulary: int = 2000
    lr: float = 3e-3

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, width=self.width, heads=self.heads)
        at_least(2, length=self.length, held_out=self.held_out)
        at_least(2 * self.length, batch_tokens=self.batch_tokens)


def remembered_text(data: str | None, out: Path) -> dict[str, Any]:
    """A recipe's data: WikiText-2 in the folder `data`; the book in the file `data`, cut into `out`/book; the
    default text without one."""
    if data is None or not Path(data).is_file():
        return wikitext(data)
    with opened(Path(data)) as file:
        whole = file.read().replace("\r\n", "\n")
    marked = BOOK.search(whole)
    book = marked[1] if marked else whole
    cut = book.find("\n", len(book) - len(book) // HELD_OUT) + 1
    if not book[:cut].strip() or not book[cut:].strip():
        raise InputError(
            f"data: {data} is too short a book to hold out the last twentieth; take a longer one"
        )
    files = {"path": book[:cut], "validation": book[cut:]}
    for role, text in files.items():
        atomic_write(out / "book" / f"{role}.txt", text.encode())
    return {role: str((out / "book" / f"{role}.txt").absolute()) for role in files} | {"format": "text"}


def first_tokens(data: str | None, out: Path, train: int, validation: int) -> dict[str, str]:
    """Files of the beginning of `remembered_text`, cut into `out`/text and long enough for so many tokens:
    `path` to train on, `validation`."""
    named, files = remembered_text(data, out), dict[str, str]()
    for role, split, tokens in (("path", "train", train), ("validation", "validation", validation)):
        source = DataConfig.from_dict({**named, "format": "text"} if named else {})
        rows = read(source, ("text",), getattr(source, role), split)
        text = "".join(str(dict(row)["text"]) for row in rows)
        files[role] = str((out / "text" / f"{role}.txt").absolute())
        atomic_write(files[role], text[: CHARACTERS * tokens].encode())
    return files


def recipe_in_order(
    claim: InOrderClaim, data: dict[str, Any], memory: str, row_length: int, steps: int, seed: int
) -> dict[str, Any]:
    """A decoder with Transformer-XL's positions and such a memory that reads rows in order."""
    return {
        "task": {
            "kind": "lm",
            "feed": "in_order",
            "row_length": row_length,
            "batch_tokens": claim.batch_tokens,
        },
        "model": decoder_options(claim, position="transformer_xl", dropout=0.0, memory=memory),
        "data": data,
        "tokenizer": {"algorithm": "bpe", "vocab_size": claim.vocabulary},
        "optimizer": {"kind": "adamw", "lr": claim.lr},
        "schedule": {"kind": "cosine", "warmup": min(100, steps)},
        "training": {
            "steps": steps,
            "reporting": {"log_every": 100, "evaluate_every": steps},
            "saving": {"checkpoint_every": 500},
        },
        "seed": seed,
    }


@torch.no_grad()
def perplexity(fitted: Fitted, most: int, overlap: int | None = None) -> float:
    """Per token of the first documents of the validation text, of `most` tokens or a little more, read in
    order; with `overlap`, in rows that repeat so many tokens."""
    task = fitted.task
    assert isinstance(task, LanguageModelling)
    assert fitted.splits.validation is not None
    if overlap is not None:
        options = dataclasses.replace(task.config, feed="packed", overlap=overlap)
        task = LanguageModelling(options, task.tokenizer)
    held: list[Any] = list(fitted.splits.validation)
    rows, tokens = list[Any](), 0
    while held and tokens < most:
        rows.append(held.pop(0))
        tokens += len(task.documents(rows[-1:])[0])
    return task.measure(fitted.model.eval(), task.held_out(rows))["perplexity"]
