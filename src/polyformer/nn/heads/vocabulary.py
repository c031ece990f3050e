"""The base classes of heads that predict tokens, and the language-model head for the next token."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.cross_entropy import linear_cross_entropy
from polyformer.core.ops.int8 import Int8Weight, as_matrix, matrix_product
from polyformer.core.ranges import PositiveFloat, Probability
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape
from polyformer.nn.heads.problem_types import mean_cross_entropy
from polyformer.nn.heads.transform import TransformConfig, build_transform
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

    `polyformer.training.distributed.vocabulary_parallel` has a version for processes that each have some of
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


class VocabularyHead(Head):
    """A head with logits = transform(hidden) W^T + b, where W is the token table itself if `tied`."""

    supports_vocabulary_parallel = True
    bias: Tensor | None
    soft_cap: float | None = None
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
            if self.soft_cap is not None:
                logits = self.capped(self.output.logits(hidden, weight, bias))
                return mean_cross_entropy(logits, labels, smoothing), lambda: logits
            # The loss is fused with the product, as logits [B, T, V] are the largest tensor of training.
            loss = self.output.loss(hidden, weight, bias, labels, smoothing)
        return loss, lambda: self.capped(self.output.logits(hidden, weight, bias))

    def capped(self, logits: Tensor) -> Tensor:
        """Return c tanh(logits / c) for a soft cap c."""
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()


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
        self.soft_cap = config.soft_cap
        self.supports_vocabulary_parallel = config.soft_cap is None

    def transform(self, hidden: Tensor) -> Tensor:
        """Return h after the optional `transform`, times the factors of the logits."""
        hidden = self.layer(hidden)
        return hidden * self.factor if self.factor != 1.0 else hidden
