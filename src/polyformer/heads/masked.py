"""Heads that predict masked tokens."""

import dataclasses
from typing import ClassVar

from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.heads.base import HeadInput, HeadShape
from polyformer.heads.vocabulary import VocabularyConfig, VocabularyHead
from polyformer.ops.activations import activation
from polyformer.ops.linear import Linear
from polyformer.position import Learned


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig(VocabularyConfig):
    """BERT's transform (dense, activation, norm) before the vocabulary."""

    activation: str = "gelu"
    eps: float = 1e-12  # of the norm
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True  # of the vocabulary

    kind: ClassVar[str] = "masked"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1, task 1"

    def __post_init__(self) -> None:
        activation(self.activation)

    def parts(self) -> dict[str, str]:
        """The whole head predicts masked tokens."""
        return {"tokens": ""}

    @classmethod
    def examples(cls) -> "tuple[MaskedConfig, ...]":
        """With and without biases."""
        return cls(), cls(dense_bias=False, norm_bias=False, bias=False)

    def build(self, shape: HeadShape) -> "MaskedHead":
        """Linear E -> width of a token vector, activation, norm, vocabulary."""
        return MaskedHead(shape, self)


class MaskedHead(VocabularyHead):
    """Predicts the masked tokens."""

    spreads = True

    def __init__(self, shape: HeadShape, config: MaskedConfig):
        super().__init__(shape, bias=config.bias)
        self.activation = activation(config.activation)
        self.dense = Linear(shape.hidden_size, shape.vector_size, bias=config.dense_bias)
        self.norm = nn.LayerNorm(shape.vector_size, eps=config.eps, bias=config.norm_bias)

    def transform(self, hidden: Tensor) -> Tensor:
        """norm(act(W h + b))."""
        return self.norm(self.activation(self.dense(hidden)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnhancedMaskedConfig(MaskedConfig):
    """DeBERTa's enhanced mask decoder: absolute positions enter where masked tokens are predicted, no sooner.

        z = h + P[pos];   `passes` times: z = last_layer(queries z, keys and values of h);   logits of z

    h is the input of the encoder's last layer, whose weights all passes share: the paper's n = 2 (section
    3.2). As in the released training code that layer belongs to the encoder and stays for fine-tuning, but
    its own output, `last_hidden_state`, takes no part here; the paper's table could also be other
    information. Where a layer normalises its input (pre-norm), z and h are normalised by it as usual.
    """

    passes: int = 2
    max_position_embeddings: int = 512  # of the table P; a longer text is an error

    kind: ClassVar[str] = "enhanced_masked"
    paper: ClassVar[str] = "He et al. 2021 (DeBERTa), section 3.2"
    causal: ClassVar[bool] = False
    again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 1:
            raise InputError(f"passes: expected 1 or more, got {self.passes}; without any use 'masked'")

    def longer(self, before: int, after: int) -> "EnhancedMaskedConfig":
        """The table of positions grows to `after` rows, and never shrinks."""
        return dataclasses.replace(self, max_position_embeddings=max(self.max_position_embeddings, after))

    def build(self, shape: HeadShape) -> "EnhancedMaskedHead":
        """The masked head and the table P; the last layer stays the encoder's."""
        return EnhancedMaskedHead(shape, self)


class EnhancedMaskedHead(MaskedHead):
    """Predicts the masked tokens from their positions too."""

    spreads = False

    def __init__(self, shape: HeadShape, config: EnhancedMaskedConfig):
        super().__init__(shape, config)
        self.passes = config.passes
        self.position = Learned([shape.hidden_size], config.max_position_embeddings)

    def states(self, inputs: HeadInput) -> Tensor:
        """z = h + P[pos], then `passes` times z = last_layer(z, h, h)."""
        last = inputs.last
        assert last is not None, "a model gives it to heads that declare `again`"
        z = self.position.embed(last.read, last.pos, 0)
        for _ in range(self.passes):
            z = last.run(z)
        return z
