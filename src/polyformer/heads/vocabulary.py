"""Heads that predict tokens: the next one (language model) or a hidden one (masked language model)."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.activations import activation
from polyformer.core.cross_entropy import linear_cross_entropy
from polyformer.core.errors import InputError
from polyformer.core.linear import Linear, linear
from polyformer.heads.base import Head, HeadConfig, HeadInput
from polyformer.position import Learned


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyConfig(HeadConfig):
    """Heads whose labels are tokens."""

    def example_labels(self, rows: int, length: int, vocab_size: int) -> Tensor:
        return torch.randint(vocab_size, (rows, length))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(VocabularyConfig):
    """Logits over the vocabulary; `label_smoothing` is the mass spread evenly, in training only."""

    label_smoothing: float = 0.0
    bias: bool = False

    kind: ClassVar[str] = "language_model"
    row: ClassVar[str] = "A4"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.4"

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise InputError(f"label_smoothing: expected a mass in [0, 1), got {self.label_smoothing}")

    @classmethod
    def examples(cls) -> tuple["LanguageModelConfig", ...]:
        return cls(), cls(label_smoothing=0.1, bias=True)

    def build(self, hidden_size: int, vocab_size: int, tied: bool) -> "LanguageModelHead":
        return LanguageModelHead(hidden_size, vocab_size, tied, self)


class VocabularyHead(Head):
    """logits = transform(hidden) W^T + b, where W is the token table itself when `tied`."""

    def __init__(self, hidden_size: int, vocab_size: int, tied: bool, bias: bool, smoothing: float):
        super().__init__()
        self.smoothing = smoothing
        self.weight = None if tied else nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if bias else None

    def transform(self, hidden: Tensor) -> Tensor:
        """What is done to the hidden states before they meet the vocabulary."""
        return hidden

    def states(self, inputs: HeadInput) -> Tensor:
        """The hidden states [B, T, E] that are decoded."""
        return inputs.hidden

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> tuple[Tensor | None, Callable[[], Tensor]]:
        weight = inputs.table if self.weight is None else self.weight
        hidden = self.transform(self.states(inputs))
        loss = None
        if labels is not None:
            smoothing = self.smoothing if self.training else 0.0
            loss = linear_cross_entropy(hidden, weight, self.bias, labels, smoothing)
        return loss, lambda: linear(hidden, weight, self.bias)


class LanguageModelHead(VocabularyHead):
    """Predicts the next token."""

    predicts_next = True

    def __init__(self, hidden_size: int, vocab_size: int, tied: bool, config: LanguageModelConfig):
        super().__init__(hidden_size, vocab_size, tied, config.bias, config.label_smoothing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig(VocabularyConfig):
    """BERT's transform (dense, activation, norm) before the vocabulary."""

    activation: str = "gelu"
    eps: float = 1e-12  # of the norm

    kind: ClassVar[str] = "masked"
    row: ClassVar[str] = "A3"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1, task 1"

    def __post_init__(self) -> None:
        activation(self.activation)

    def build(self, hidden_size: int, vocab_size: int, tied: bool) -> "MaskedHead":
        return MaskedHead(hidden_size, vocab_size, tied, self)


class MaskedHead(VocabularyHead):
    """Predicts the tokens that were hidden."""

    def __init__(self, hidden_size: int, vocab_size: int, tied: bool, config: MaskedConfig):
        super().__init__(hidden_size, vocab_size, tied, bias=True, smoothing=0.0)
        self.activation = activation(config.activation)
        self.dense = Linear(hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=config.eps)

    def transform(self, hidden: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnhancedMaskedConfig(MaskedConfig):
    """DeBERTa's enhanced mask decoder: absolute positions enter where hidden tokens are predicted, no sooner.

        z = h + P[pos];   `passes` times: z = last_layer(queries z, keys and values of h);   logits of z

    h is the input of the encoder's last layer, whose weights all passes share: the paper's n = 2 (section
    3.2). As in the released training code that layer belongs to the encoder and stays for fine-tuning, but
    its own output, `last_hidden_state`, takes no part here; the paper's table could also be other
    information. Where a layer normalises its input (pre-norm), z and h are normalised by it as usual.
    """

    passes: int = 2
    max_position_embeddings: int = 512  # of the table P; a longer text is an error

    kind: ClassVar[str] = "enhanced_masked"
    row: ClassVar[str] = "P10"
    paper: ClassVar[str] = "He et al. 2021 (DeBERTa), section 3.2"
    causal: ClassVar[bool] = False
    again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 1:
            raise InputError(f"passes: expected 1 or more, got {self.passes}; without any use 'masked'")

    def build(self, hidden_size: int, vocab_size: int, tied: bool) -> "EnhancedMaskedHead":
        return EnhancedMaskedHead(hidden_size, vocab_size, tied, self)


class EnhancedMaskedHead(MaskedHead):
    """Predicts the tokens that were hidden, knowing where they stand."""

    def __init__(self, hidden_size: int, vocab_size: int, tied: bool, config: EnhancedMaskedConfig):
        super().__init__(hidden_size, vocab_size, tied, config)
        self.passes = config.passes
        self.position = Learned(hidden_size, 1, config.max_position_embeddings)

    def states(self, inputs: HeadInput) -> Tensor:
        last = inputs.last
        assert last is not None, "a model gives it to heads that declare `again`"
        z = self.position.embed(last.read, last.pos, 0)
        for _ in range(self.passes):
            z = last.run(z)
        return z
