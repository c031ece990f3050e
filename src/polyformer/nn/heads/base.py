"""The interface of heads: hidden states in, a loss or predictions out; and layers before their last layer."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.ops.int8 import Int8Weight
from polyformer.core.ops.layers import ActivationName, Dropout, activation
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ranges import PositiveFloat, PositiveInt, Probability
from polyformer.nn.stack import AdaptiveConfig, AdaptiveEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The sizes of a head's model: E, the table of V token vectors, and whether the head shares the table."""

    hidden_size: int
    vocab_size: int
    tied: bool = True
    table_size: int | None = None  # width of a token vector, if not E
    adaptive: AdaptiveConfig | None = None  # the clusters of the table, if it has some

    @property
    def vector_size(self) -> int:
        """Return the width of a token vector."""
        return self.table_size or self.hidden_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig(Config):
    """The base class of heads: `build(shape)` returns the module.

    `causal`: whether a decoder can have the head. `reruns_last_layer`: whether it runs the last layer with
    other queries.
    """

    option: ClassVar[str] = "model.head"
    causal: ClassVar[bool] = True
    reruns_last_layer: ClassVar[bool] = False

    def build(self, shape: "HeadShape") -> "Head":
        """Return the module with new weights."""
        raise NotImplementedError

    def reusable_modules(self) -> dict[str, str]:
        """Return the modules that a head of another kind can reuse, as a dictionary from name to path ("" for
        the whole head): `pooler`, the pretrained layer of a text's first token, and `tokens`, which predicts
        masked tokens."""
        return {}

    def with_max_positions(self, before: int, after: int) -> "HeadConfig":
        """Return the configuration for a model of `after` positions instead of `before`."""
        return self

    def global_attention_mask(self, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return which of the tokens [B, T] `Marked()` makes global, if the caller marks none."""
        return None

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor | None:
        """Return random labels for texts [rows, length], for tests and measurements, or None."""
        return None

    def example_sentence_labels(self, rows: int) -> Tensor | None:
        """Return random labels for whole texts; None if it takes none."""
        return None


HeadOutput = tuple[Tensor | None, Callable[[], Tensor | tuple[Tensor, Tensor]]]
"""The loss, None without labels, and a function that returns the predictions: a tensor, or a pair for tokens
and texts."""


@dataclasses.dataclass(eq=False)
class HeadInput:
    """The inputs of a head.

    hidden: [B, T, E], the last layer's output. mask: [B, T] bool, True for real tokens; None when all are.
    table: [V, E], the token vectors, for heads that share them; a module if they are int8 or in clusters.
    last: for heads that run the last layer again.
    sentence_labels: [B], for heads that also predict a label of the whole text. ids: [B, T], the text's
    tokens (for an encoder-decoder the source's); None if they were read in an earlier call. neighbour_ids:
    [B, T, k], the tokens that followed similar contexts elsewhere, -1 for none. choices: the number of
    consecutive rows that are choices of the same question; None if all are. score_positions: [B], the token
    of each text from which a choice is scored; None for the token that the head pools.
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

    read: [B, T, E], its input. pos: [T] or [B, T], the positions. run: a function that returns its output for
    other queries [B, T, E] with the same keys and values.
    """

    read: Tensor
    pos: Tensor
    run: Callable[[Tensor], Tensor]


class Head(nn.Module):
    """A module that returns predictions, and the loss if there are labels."""

    predicts_next = False  # whether a decoder's labels are shifted by one before they reach this head
    predicts_sentence = False  # whether it takes sentence_labels
    reads_neighbours = False  # whether it takes neighbour_ids
    supports_context_parallel = False  # whether its loss is a mean over independent tokens
    # Whether it needs no row of the token table, or some rows per process (with a `VocabularyOutput`).
    supports_vocabulary_parallel = False
    reads_choices = False  # whether texts [B, C, T] are the C choices of B questions

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Return the mean loss over labelled items (None without labels) and a function for predictions."""
        raise NotImplementedError

    def divide_logits(self, temperature: float) -> bool:
        """Divide the logits by a temperature, in the weights; return False if the head cannot.

        So the probabilities softmax(logits / temperature) are the model's own in every format and export.
        """
        return False


@torch.no_grad()
def divide_layers(temperature: float, *layers: nn.Module) -> bool:
    """Divide all parameters of linear layers by a number; return True."""
    for layer in layers:
        for parameter in layer.parameters():
            parameter.div_(temperature)
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformConfig(Config):
    """The transform norm(act(W h)), as before BERT's vocabulary, here without biases. Warner et al. 2024."""

    activation: ActivationName = "gelu"
    eps: PositiveFloat = 1e-5  # of the norm
    dense_bias: bool = False
    norm_bias: bool = False

    def build(self, width: int) -> "Transform":
        """Return the module for vectors of a width."""
        return Transform(width, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualConfig(Config):
    """The layer norm(h + W_2 act(W_1 h)), a feed-forward layer as in BERT, before the last layer of BigBird's
    question answering. Zaheer et al. 2020, appendix E.2 (question answering)."""

    intermediate_size: PositiveInt = 3072
    activation: ActivationName = "gelu"
    eps: PositiveFloat = 1e-12  # of the norm
    dropout: Probability = 0.1  # of h before W_1, and of the term that is added to h

    def build(self, width: int) -> "ResidualTransform":
        """Return the module for vectors of a width."""
        return ResidualTransform(width, self)


class ResidualTransform(nn.Module):
    """A feed-forward layer with a residual connection: x [..., E] -> [..., E]."""

    def __init__(self, width: int, config: ResidualConfig):
        super().__init__()
        self.up, self.down = Linear(width, config.intermediate_size), Linear(config.intermediate_size, width)
        self.activation = activation(config.activation)
        self.norm = LayerNorm(width, eps=config.eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return norm(x + W_2 act(W_1 x))."""
        # Post-norm, as in BERT's layers: the norm is of the residual sum.
        return self.norm(x + self.dropout(self.down(self.activation(self.up(self.dropout(x))))))


class Transform(nn.Module):
    """A linear layer with an activation and a norm: x [..., E] -> [..., E]."""

    def __init__(self, width: int, config: TransformConfig):
        super().__init__()
        self.dense = Linear(width, width, bias=config.dense_bias)
        self.activation = activation(config.activation)
        self.norm = LayerNorm(width, eps=config.eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return norm(act(W x))."""
        return self.norm(self.activation(self.dense(x)))


def build_transform(config: TransformConfig | ResidualConfig | None, width: int) -> nn.Module:
    """Return the module, or the identity if `config` is None."""
    return nn.Identity() if config is None else config.build(width)
