"""A model before and after a conversion, on one text: what it predicts, how fast, in how much memory.

The text is cut into pieces of a length, each read for itself. A decoder predicts every token from those
before it in the piece; an encoder with a masked head the 15 % of the tokens that are masked, the same before
and after; an encoder that embeds gives a vector for each piece, and the two vectors are compared by their
angle. What a model cannot read (it has no positions for it) stands there as the reason.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.labels import IGNORED
from polyformer.core.memory_use import MIB, peak_memory, reset_peak_memory
from polyformer.core.timing import time_once
from polyformer.data import Tokenizer
from polyformer.data.masking import mask_tokens
from polyformer.models.architectures import Transformer
from polyformer.nn.heads import (
    AdaptiveSoftmaxConfig,
    EmbedConfig,
    LanguageModelConfig,
    MaskedConfig,
    PretrainingConfig,
)

WRITES = LanguageModelConfig, AdaptiveSoftmaxConfig
MASKED = MaskedConfig, PretrainingConfig

Piece = dict[str, Tensor]
"""Arguments of the model for one piece of the text."""


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """values: nats of each predicted token [n], or vectors of the pieces [n, E]. seconds: for `tokens` tokens
    read. mib: the most memory beside the model's, of a CPU."""

    values: Tensor
    seconds: float
    tokens: int
    mib: float

    @property
    def perplexity(self) -> float:
        """Of the predicted tokens."""
        return math.exp(float(self.values.double().mean()))


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """Both models on pieces of one length; a text says why one could not read them."""

    length: int
    before: Measured | str
    after: Measured | str
    embeds: bool

    @property
    def similarity(self) -> float | None:
        """Mean cosine of the vectors before and after, where both embed."""
        if not self.embeds or isinstance(self.before, str) or isinstance(self.after, str):
            return None
        return float(F.cosine_similarity(self.before.values, self.after.values).mean())


def compare(
    before: Transformer,
    after: Transformer,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    lengths: Sequence[int],
    tokens: int,
) -> Iterator[Compared]:
    """Both models on the text `ids` at each length, over at most `tokens` tokens but one piece at least.

    Raises:
        InputError: a model whose head neither predicts tokens nor embeds, or a text shorter than a length.
    """
    read = reading(before, tokenizer)
    for length in lengths:
        pieces = [*read.pieces(ids, length, max(1, tokens // length))]
        if not pieces:
            raise InputError(
                f"the text has {len(ids)} tokens, too few for a piece of {length}; "
                "name a longer text, or a smaller length"
            )
        results = [measured(model, read, pieces, length) for model in (before, after)]
        yield Compared(length, *results, embeds=read.embeds)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a text is read by models of one kind of head."""

    pieces: Callable[[Sequence[int], int, int], Iterator[Piece]]
    values: Callable[[Transformer, Piece], Tensor]
    embeds: bool = False


def reading(model: Transformer, tokenizer: Tokenizer) -> Reading:
    """How `model` reads a text; `InputError` for one that is measured by other than a text alone."""
    head = model.config.head
    if model.encoder is None and isinstance(head, WRITES):
        return Reading(causal_pieces, nats)
    if model.decoder is None and isinstance(head, MASKED):
        return Reading(Masking(tokenizer), nats)
    if model.decoder is None and isinstance(head, EmbedConfig):
        return Reading(Framing(tokenizer), vectors, embeds=True)
    raise InputError(
        f"a model with the head {quote(head.kind)} is not measured by a text alone; expected a decoder that "
        "writes, an encoder that predicts masked tokens, or one that embeds (--head masked, say)"
    )


def causal_pieces(ids: Sequence[int], length: int, number: int) -> Iterator[Piece]:
    """Pieces of `length` tokens and the one that follows each of them."""
    for start in range(0, min(number * length, len(ids) - length), length):
        piece = torch.tensor([ids[start : start + length + 1]])
        yield {"input_ids": piece[:, :-1], "shift_labels": piece[:, 1:]}


class Framing:
    """Pieces <cls> tokens <sep> of `length` tokens in all."""

    def __init__(self, tokenizer: Tokenizer):
        self.first = [token for token in (tokenizer.cls_id,) if token is not None]
        self.last = [token for token in (tokenizer.sep_id,) if token is not None]

    def __call__(self, ids: Sequence[int], length: int, number: int) -> Iterator[Piece]:
        """At most `number` pieces."""
        step = length - len(self.first) - len(self.last)
        if step < 1:
            raise InputError(f"length: expected more than the tokens around a text, got {length}")
        for start in range(0, min(number * step, len(ids) - step + 1), step):
            yield {"input_ids": torch.tensor([[*self.first, *ids[start : start + step], *self.last]])}


class Masking(Framing):
    """The same with 15 % of the tokens masked, drawn once for a text and length."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__(tokenizer)
        if tokenizer.mask_id is None:
            raise InputError("tokenizer: it has no <mask> token, which a masked head is measured by")
        self.tokenizer, self.mask_id = tokenizer, tokenizer.mask_id

    def __call__(self, ids: Sequence[int], length: int, number: int) -> Iterator[Piece]:
        """At most `number` pieces, with labels."""
        generator = np.random.default_rng(0)
        for piece in super().__call__(ids, length, number):
            masked, labels = mask_tokens(
                piece["input_ids"][0].numpy(),
                generator,
                mask_id=self.mask_id,
                ordinary_ids=self.tokenizer.ordinary_ids,
                random_share=0.0,
                kept_share=0.0,
            )
            yield {"input_ids": torch.from_numpy(masked)[None], "labels": torch.from_numpy(labels)[None]}


def nats(model: Transformer, piece: Piece) -> Tensor:
    """Mean loss, once for each predicted token [n]: the mean over pieces is then one over tokens."""
    labels = piece["shift_labels" if "shift_labels" in piece else "labels"]
    loss = model(**piece).loss
    assert loss is not None
    return loss.float().expand(int((labels != IGNORED).sum()))


def vectors(model: Transformer, piece: Piece) -> Tensor:
    """The vector of a piece [1, E]."""
    return model(**piece).logits.float()


@torch.no_grad()
def measured(model: Transformer, read: Reading, pieces: Sequence[Piece], length: int) -> Measured | str:
    """Values, time and memory over `pieces`, or why the model cannot read them."""
    values: list[Tensor] = []
    model.eval()
    resident = reset_peak_memory()
    try:
        seconds = time_once(lambda: values.extend(read.values(model, piece) for piece in pieces))
    except InputError as error:
        return str(error)
    return Measured(torch.cat(values), seconds, length * len(pieces), (peak_memory() - resident) / MIB)


def table(rows: Sequence[Compared]) -> list[str]:
    """Lines: a length each, before and after."""
    embeds = any(row.embeds for row in rows)
    kind = "similarity" if embeds else "perplexity"
    lines = [f"  length  {kind:>19}  {'tokens a second':>17}  {'MiB beside weights':>18}"]
    for row in rows:
        sides = row.before, row.after
        if embeds:
            quality = "-" if row.similarity is None else f"{row.similarity:.4f}"
        else:
            quality = _both(sides, lambda side: f"{side.perplexity:.2f}")
        speed = _both(sides, lambda side: f"{side.tokens / side.seconds:,.0f}")
        lines.append(
            f"{row.length:8,}  {quality:>19}  {speed:>17}  {_both(sides, lambda x: f'{x.mib:,.0f}'):>18}"
        )
    for name in ("before", "after"):
        reasons = dict.fromkeys(side for row in rows if isinstance(side := getattr(row, name), str))
        lines += [f"{name}, -: {reason}" for reason in reasons]
    return lines


def _both(sides: tuple[Measured | str, Measured | str], said: Callable[[Measured], str]) -> str:
    return " -> ".join("-" if isinstance(side, str) else said(side) for side in sides)


def lost(rows: Sequence[Compared], tolerance: float) -> list[str]:
    """What the conversion lost beyond `tolerance`, a sentence a length; nothing where it is good.

    The perplexity after may be (1 + tolerance) times that before at the same length; where the model before
    cannot read so far, times its own at the longest that it can. A similarity may be 1 - tolerance.
    """
    faults: list[str] = []
    reference: float | None = None
    for row in sorted(rows, key=lambda row: row.length):
        if isinstance(row.before, Measured) and not row.embeds:
            reference = row.before.perplexity
        if isinstance(row.after, str):
            faults.append(f"it cannot read {row.length:,} tokens")
        elif row.similarity is not None and row.similarity < 1 - tolerance:
            faults.append(f"vectors of {row.length:,} tokens keep a similarity of {row.similarity:.4f}")
        elif not row.embeds and reference and row.after.perplexity > (1 + tolerance) * reference:
            ratio = row.after.perplexity / reference
            faults.append(f"perplexity at {row.length:,} tokens is {ratio:.3f} times that of before")
    return faults
