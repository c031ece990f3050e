"""Heads that predict tokens: the base classes, the language model for the next token, and SPALM.

A language model that uses the tokens that followed similar contexts in a text: SPALM.

    m_t = sum_i softmax_i(w_i . h_t) w_i          w_i: the vectors of the neighbours' tokens, rows of W
    g_t = sigmoid(w_g . h_t)
    z_t = (1 - g_t) m_t + g_t h_t
    p(next | text) = softmax(W z_t)               W: the token table, tied

The neighbours of token t are the tokens that followed the k contexts in a datastore that are nearest to the
context of t. A frozen model finds them (`polyformer.applications.retrieval.neighbours`), and with `memory:
recurrent` the decoder is the paper's. Gradients reach h, w_g and W, also through the w_i. The distances of
the neighbours are not used. A missing neighbour (-1) is left out of the softmax, and if all are missing z_t =
h_t: the model without a datastore is a plain language model. Yogatama et al. 2021, section 3.

Cost: k rows of W for each token, O(k E) operations and memory.
"""

import dataclasses
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.core.ops.int8 import Int8Weight, as_matrix, matrix_product
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.softmax import softmax
from polyformer.core.ranges import PositiveFloat, Probability
from polyformer.nn.heads.base import (
    Head,
    HeadConfig,
    HeadInput,
    HeadOutput,
    HeadShape,
    TransformConfig,
    build_transform,
)
from polyformer.nn.heads.classification import mean_cross_entropy
from polyformer.nn.stack import AdaptiveEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyConfig(HeadConfig):
    """The base class of heads with tokens as labels."""

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        """Return token ids [B, T]."""
        return torch.randint(vocab_size, (rows, length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(VocabularyConfig):
    """Language-model head: logits over the vocabulary for the next token.

    `label_smoothing` is the probability mass that is spread evenly over the vocabulary, only in training.
    `logit_scale` multiplies the logits (Cohere, Granite), and `soft_cap` limits them by tanh (Gemma 2).
    """

    label_smoothing: Probability = 0.0
    bias: bool = False
    frozen_bias: bool = False  # the bias is never trained, as in BART
    scaled: bool = False  # hidden states are divided by sqrt(hidden_size) first, as in T5 if tied
    transform: TransformConfig | None = None  # before the vocabulary, as in a BERT that is a decoder
    logit_scale: PositiveFloat = 1.0
    soft_cap: PositiveFloat | None = None

    kind: ClassVar[str] = "language_model"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.4"

    @classmethod
    def examples(cls) -> tuple["LanguageModelConfig", ...]:
        transform = TransformConfig(dense_bias=True, norm_bias=True)
        return (
            cls(),
            cls(label_smoothing=0.1, bias=True, frozen_bias=True, scaled=True),
            cls(bias=True, transform=transform),
            cls(label_smoothing=0.1, logit_scale=0.5, soft_cap=2.0),
        )

    def build(self, shape: HeadShape) -> "LanguageModelHead":
        """Return the head, which has no weights if it is tied and has no bias."""
        return LanguageModelHead(shape, self)


class VocabularyOutput:
    """The loss and logits for hidden states [..., E], a matrix over the vocabulary [V, E] and a bias [V].

    `polyformer.training.distributed.tensor_parallel` has a version for processes that each have some of
    the rows.
    """

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor | Int8Weight,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Return `linear_cross_entropy`, which never builds the logits [..., V] at once."""
        return linear_cross_entropy(hidden, as_matrix(weight), bias, labels, smoothing)

    def logits(self, hidden: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        """Return the logits [..., V]."""
        return matrix_product(hidden, weight, bias)


class CappedOutput(VocabularyOutput):
    """Logits z limited to c tanh(z / c), with the soft cap c (Gemma Team 2024, section 2)."""

    def __init__(self, soft_cap: float):
        self.soft_cap = soft_cap

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor | Int8Weight,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """Return the mean cross-entropy of all logits [..., V], which are built at once."""
        return mean_cross_entropy(self.logits(hidden, weight, bias), labels, smoothing)

    def logits(self, hidden: Tensor, weight: Tensor | Int8Weight, bias: Tensor | None) -> Tensor:
        return self.soft_cap * (super().logits(hidden, weight, bias) / self.soft_cap).tanh()


class VocabularyHead(Head):
    """A head with logits = transform(hidden) W^T + b, where W is the token table itself if `tied`."""

    supports_vocabulary_parallel = True
    bias: Tensor | None
    output = VocabularyOutput()

    def __init__(self, shape: HeadShape, bias: bool, smoothing: float = 0.0, frozen: bool = False):
        super().__init__()
        if shape.tied and shape.adaptive is not None:
            raise InputError(
                "head: it needs one table of all tokens, but embedding.adaptive has one per cluster; use the "
                "head 'adaptive_softmax', or a separate output table: embedding.tied=False"
            )
        self.smoothing = smoothing
        weight = torch.empty(shape.vocab_size, shape.vector_size)
        self.weight: Tensor | Int8Weight | None = None if shape.tied else nn.Parameter(weight)
        zeros = torch.zeros(shape.vocab_size) if bias else None
        if frozen:
            self.register_buffer("bias", zeros)
        else:
            self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))

    def transform(self, hidden: Tensor) -> Tensor:
        """Transform the hidden states before the vocabulary matrix."""
        return hidden

    def states(self, inputs: HeadInput) -> Tensor:
        """Return the hidden states [B, T, E] from which tokens are predicted."""
        return inputs.hidden

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Return the loss, and a function that computes the logits [B, T, V] when it is called."""
        weight = inputs.table if self.weight is None else self.weight
        assert not isinstance(weight, AdaptiveEmbedding)
        bias = self.bias  # read now: `torch.func.functional_call` replaces tensors only during this call
        hidden = self.transform(self.states(inputs))
        loss = None
        if labels is not None:
            smoothing = self.smoothing if self.training else 0.0
            # The loss is fused with the product, as logits [B, T, V] are the largest tensor of training.
            loss = self.output.loss(hidden, weight, bias, labels, smoothing)
        return loss, lambda: self.output.logits(hidden, weight, bias)


class LanguageModelHead(VocabularyHead):
    """A head that predicts the next token."""

    predicts_next = True
    supports_context_parallel = True

    def __init__(self, shape: HeadShape, config: LanguageModelConfig):
        if not shape.tied:
            shape = dataclasses.replace(shape, table_size=None)
        elif shape.vector_size != shape.hidden_size:
            raise InputError(
                f"embedding.size: head 'language_model' needs token vectors of hidden_size "
                f"{shape.hidden_size}, got {shape.vector_size}; use a separate output table "
                "(tied=False), or the head 'masked', which has a layer before the table"
            )
        super().__init__(shape, config.bias, config.label_smoothing, config.frozen_bias)
        self.layer = build_transform(config.transform, shape.hidden_size)
        # A tied table of vectors of length sqrt(E) would give logits sqrt(E) times too large.
        self.factor = config.logit_scale * (shape.hidden_size**-0.5 if config.scaled else 1.0)
        if config.soft_cap is not None:
            self.output = CappedOutput(config.soft_cap)
            self.supports_vocabulary_parallel = False

    def transform(self, hidden: Tensor) -> Tensor:
        """Return h after the optional `transform`, times the factors of the logits."""
        hidden = self.layer(hidden)
        return hidden * self.factor if self.factor != 1.0 else hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class SemiparametricConfig(LanguageModelConfig):
    """Semiparametric head: a gate mixes hidden states with tokens that followed similar contexts.

    SPALM: `gate` is a number for each token, as in the paper, or a number for each of its dimensions.
    """

    gate: Literal["scalar", "vector"] = "scalar"

    kind: ClassVar[str] = "semiparametric"
    paper: ClassVar[str] = "Yogatama et al. 2021 (SPALM), section 3.3"

    @classmethod
    def examples(cls) -> tuple["SemiparametricConfig", ...]:
        return cls(), cls(gate="vector", label_smoothing=0.1, bias=True)

    def build(self, shape: HeadShape) -> "SemiparametricHead":
        return SemiparametricHead(shape, self)


class SemiparametricHead(LanguageModelHead):
    """A head that predicts the next token from the hidden state and the neighbours' tokens."""

    reads_neighbours = True
    supports_context_parallel = False
    supports_vocabulary_parallel = False  # it looks up rows of any token

    def __init__(self, shape: HeadShape, config: SemiparametricConfig):
        super().__init__(shape, config)
        self.gate = Linear(shape.hidden_size, 1 if config.gate == "scalar" else shape.hidden_size, bias=False)

    def states(self, inputs: HeadInput, bias: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Return z [B, T, E]. bias: [B, T, k], added to the scores w_i . h_t. factor: of m_t."""
        h, near = inputs.hidden, inputs.neighbour_ids
        if near is None:
            return h
        table = inputs.table if self.weight is None else self.weight
        assert not isinstance(table, AdaptiveEmbedding)
        present = near >= 0
        # [B, T, k, E]; -1 looks up row 0, which `present` masks below.
        vectors = F.embedding(near.clamp_min(0), as_matrix(table))
        scores = (vectors @ h.unsqueeze(-1)).squeeze(-1)
        weights, _ = softmax(scores if bias is None else scores + bias, present)
        # m_t, the mean of the neighbours' vectors with the softmax weights of the equation.
        pooled = factor * (weights.unsqueeze(-2) @ vectors).squeeze(-2)
        gate = torch.sigmoid(self.gate(h))
        return torch.where(present.any(-1, keepdim=True), (1 - gate) * pooled + gate * h, h)
