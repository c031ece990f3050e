"""Heads that predict masked tokens."""

import dataclasses
from typing import Annotated, ClassVar

from torch import Tensor

from polyformer.attention.positions import Learned
from polyformer.core.ops.activations import ActivationName, activation
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ranges import PositiveInt, Wording
from polyformer.nn.heads.base import HeadInput, HeadShape
from polyformer.nn.heads.vocabulary import VocabularyConfig, VocabularyHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig(VocabularyConfig):
    """Masked-language-model head: logits over the vocabulary for masked tokens.

    It applies BERT's transform (dense, activation, norm) before the vocabulary matrix.
    """

    activation: ActivationName = "gelu"
    eps: float = 1e-12  # of the norm
    dense_bias: bool = True
    norm_bias: bool = True
    bias: bool = True  # of the vocabulary

    kind: ClassVar[str] = "masked"
    paper: ClassVar[str] = "Devlin et al. 2019, section 3.1, task 1"

    def reusable_modules(self) -> dict[str, str]:
        """Return the whole head as the part that predicts masked tokens."""
        return {"tokens": ""}

    @classmethod
    def examples(cls) -> "tuple[MaskedConfig, ...]":
        return cls(), cls(dense_bias=False, norm_bias=False, bias=False)

    def build(self, shape: HeadShape) -> "MaskedHead":
        return MaskedHead(shape, self)


class MaskedHead(VocabularyHead):
    """A head that predicts masked tokens."""

    supports_context_parallel = True

    def __init__(self, shape: HeadShape, config: MaskedConfig):
        super().__init__(shape, bias=config.bias)
        self.activation = activation(config.activation)
        self.dense = Linear(shape.hidden_size, shape.vector_size, bias=config.dense_bias)
        self.norm = LayerNorm(shape.vector_size, eps=config.eps, bias=config.norm_bias)

    def transform(self, hidden: Tensor) -> Tensor:
        """Return norm(act(W h + b))."""
        return self.norm(self.activation(self.dense(hidden)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnhancedMaskedConfig(MaskedConfig):
    """DeBERTa's enhanced mask decoder: absolute positions are added only where masked tokens are predicted.

        z = h + P[pos];   `passes` times: z = last_layer(queries z, keys and values of h);   logits of z

    h is the input of the encoder's last layer, and all passes share the weights of this layer: the paper's n
    = 2 (section 3.2). As in the released training code the layer belongs to the encoder and remains for
    fine-tuning, but its direct output, `last_hidden_state`, is not used here; the paper's table could also
    contain other information. If a layer normalizes its input (pre-norm), it normalizes z and h as usual.
    """

    passes: Annotated[PositiveInt, Wording(fix="without any use 'masked'")] = 2
    max_position_embeddings: int = 512  # of the table P; a longer text is an error

    kind: ClassVar[str] = "enhanced_masked"
    paper: ClassVar[str] = "He et al. 2021 (DeBERTa), section 3.2"
    causal: ClassVar[bool] = False
    reruns_last_layer: ClassVar[bool] = True

    def with_max_positions(self, before: int, after: int) -> "EnhancedMaskedConfig":
        """Return the configuration with a table of at least `after` positions; it never shrinks."""
        return dataclasses.replace(self, max_position_embeddings=max(self.max_position_embeddings, after))

    def build(self, shape: HeadShape) -> "EnhancedMaskedHead":
        """Return the masked head and the table P; the last layer remains in the encoder."""
        return EnhancedMaskedHead(shape, self)


class EnhancedMaskedHead(MaskedHead):
    """A head that predicts masked tokens also from their positions."""

    supports_context_parallel = False

    def __init__(self, shape: HeadShape, config: EnhancedMaskedConfig):
        super().__init__(shape, config)
        self.passes = config.passes
        self.position = Learned([shape.hidden_size], config.max_position_embeddings)

    def states(self, inputs: HeadInput) -> Tensor:
        """Return z = h + P[pos] after `passes` times z = last_layer(z, h, h)."""
        last = inputs.last
        assert last is not None, "a model passes it to heads with reruns_last_layer"
        z = self.position.embed(last.read, last.pos, 0)
        for _ in range(self.passes):
            # Queries of z, keys and values of h: positions enter only through the queries.
            z = last.run(z)
        return z
