"""What every head has in common: hidden states in, a loss or predictions out."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.ops.int8_layers import Int8Weight
from polyformer.stack import AdaptiveConfig, AdaptiveEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The model that a head is built for: E, the table of V token vectors, and whether the head reads it."""

    hidden_size: int
    vocab_size: int
    tied: bool = True
    table_size: int | None = None  # width of a token vector, where that is not E
    adaptive: AdaptiveConfig | None = None  # the clusters of that table, where it has some

    @property
    def vector_size(self) -> int:
        """The width of a token vector."""
        return self.table_size or self.hidden_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(Config):
    """Family of heads: `build(shape)` makes the module.

    `causal` says whether a decoder can have the head, `again` whether it runs the last layer again.
    """

    causal: ClassVar[bool] = True
    again: ClassVar[bool] = False

    def build(self, shape: "HeadShape") -> "Head":
        """The module with new weights."""
        raise NotImplementedError

    def parts(self) -> dict[str, str]:
        """What of it a head of another kind can go on with, by name, and where that stands here ("" for all
        of it): `pooler`, the pretrained layer of a text's first token, and `tokens`, what predicts masked
        tokens."""
        return {}

    def longer(self, before: int, after: int) -> "HeadConfig":
        """The same in a model of `after` positions in place of `before`."""
        return self

    def marks(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which of the tokens [B, T] are global for patterns with `Marked()` where the caller marks none."""
        return None

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor | None:
        """Random labels for texts [rows, length], for tests and measurements; None if it takes none."""
        return None

    def example_sentence_labels(self, rows: int) -> Tensor | None:
        """The same of the texts as wholes."""
        return None


Predicted = tuple[Tensor | None, Callable[[], Tensor | tuple[Tensor, Tensor]]]
"""The loss, None without labels, and what makes the predictions: one tensor, or tokens' and texts'."""


@dataclasses.dataclass(frozen=True, eq=False)
class HeadInput:
    """What a head may look at.

    hidden: [B, T, E], the last layer's output. mask: [B, T] bool, True for real tokens; None when all are.
    table: [V, E], the token vectors, for heads that share them; a module where they are int8 or in clusters.
    last: for heads that run that layer again.
    sentence_labels: [B], for heads that predict something of the whole text beside its tokens. ids: [B, T],
    the text's tokens, of an encoder-decoder the source's; None where they were read before. neighbour_ids:
    [B, T, k], the tokens that followed similar contexts elsewhere, -1 for none. choices: how many rows that
    follow one another are choices of one question; None where all are. score_positions: [B], the token of
    each text that a choice is scored at; None for the one that the head pools.
    """

    hidden: Tensor
    mask: Tensor | None
    table: Tensor | Int8Weight | AdaptiveEmbedding
    last: "LastLayer | None" = None
    sentence_labels: Tensor | None = None
    ids: Tensor | None = None
    neighbour_ids: Tensor | None = None
    choices: int | None = None
    score_positions: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class LastLayer:
    """An encoder's last layer.

    read: [B, T, E], its input. pos: [T] or [B, T], the positions. run: its output for other queries
    [B, T, E] that attend to what it read.
    """

    read: Tensor
    pos: Tensor
    run: Callable[[Tensor], Tensor]


class Head(nn.Module):
    """Predictions, and the loss when there are labels."""

    predicts_next = False  # whether a decoder's labels are shifted by one before they reach this head
    predicts_sentence = False  # whether it takes sentence_labels
    reads_neighbours = False  # whether it takes neighbour_ids
    spreads = False  # whether its loss is a mean over labels of single tokens, each made of that token alone
    divides = (
        False  # whether it can do with some of the rows of the token table: by an `Output`, or with none
    )
    reads_choices = False  # whether texts [B, C, T] are the C choices of B questions

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> Predicted:
        """The mean loss over labelled items (None without labels) and what makes the predictions."""
        raise NotImplementedError
