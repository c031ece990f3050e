"""Vectors of texts and images in a common space, whose angles say whether they belong together.

    embed_projected   P pool(h) (+ b)                                pool(h): a token, such as the end token
    embed_attended    y + mlp(norm(y)),  y = attention(p, h, h)      p a learned query

The text encoders of CLIP (Radford et al. 2021, section 2.4) and SigLIP project the last token. The image
encoder of SigLIP (Zhai et al. 2023) attends to all patches with a learned query, after Lee et al. 2019 (Set
Transformer), section 3.2, with the feed-forward of Zhai et al. 2022.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import ActivationName, Pooling, pool
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNorm
from polyformer.core.ranges import PositiveInt, UnitFloat
from polyformer.core.sequence.context import Context
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedProjectedConfig(HeadConfig):
    """Projected embedding: a token's vector, projected into a space that other models share.

    `end_token`: pools the first token with this id, as CLIP does, or the last token of a text without it;
    `pooling` is then ignored. `projection`: the width of the space; None for the model's. `normalize`: scales
    the vector to length 1.
    """

    pooling: Pooling = "last"
    end_token: int | None = None
    projection: PositiveInt | None = None
    projection_bias: bool = False
    normalize: bool = True

    kind: ClassVar[str] = "embed_projected"
    paper: ClassVar[str] = "Radford et al. 2021 (CLIP), section 2.4"

    @classmethod
    def examples(cls) -> tuple["EmbedProjectedConfig", ...]:
        return cls(projection=6), cls(end_token=3, projection_bias=True, normalize=False)

    def build(self, shape: HeadShape) -> "EmbedProjected":
        return EmbedProjected(shape, self)


class EmbedProjected(Head):
    """A head with predictions [B, width] and no labels."""

    supports_vocabulary_parallel = True

    def __init__(self, shape: HeadShape, config: EmbedProjectedConfig):
        super().__init__()
        self.config = config
        width = config.projection or shape.hidden_size
        self.projection = Linear(shape.hidden_size, width, bias=config.projection_bias)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute P pool(h), at length 1 if `normalize`."""
        refuse_labels(labels, self.config.kind)
        if self.config.end_token is None:
            pooled = pool(inputs.hidden, inputs.mask, self.config.pooling)
        else:
            pooled = self._at_end(inputs, self.config.end_token)
        vector = self.projection(pooled)
        return None, lambda: F.normalize(vector, dim=-1) if self.config.normalize else vector

    def _at_end(self, inputs: HeadInput, token: int) -> Tensor:
        """Return the hidden states of the first token `token` of each text [B, E]."""
        if inputs.ids is None or inputs.ids.shape != inputs.hidden.shape[:2]:
            raise InputError(
                f"input_ids: this head pools the first token {token} of each text and needs the ids of all "
                "tokens; read the whole text in a call, as ids"
            )
        ends = inputs.ids == token
        ends = ends if inputs.mask is None else ends & inputs.mask
        last = pool(inputs.hidden, inputs.mask, "last")
        return torch.where(ends.any(1, keepdim=True), pool(inputs.hidden, ends, "first"), last)


def refuse_labels(labels: Tensor | None, kind: str) -> None:
    """Raise `InputError` for labels of a head without a loss."""
    if labels is not None:
        raise InputError(f"labels: the head '{kind}' has no loss; leave labels out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedAttendedConfig(HeadConfig):
    """Attended embedding: a learned query attends to all tokens, and a feed-forward follows.

    `pool_heads`, `pool_size`, `pool_activation`, `pool_eps`: the heads of that attention, the inner width and
    the activation of the feed-forward, and the epsilon of its norm. `normalize`: scales the vector to length
    1.
    """

    pool_heads: PositiveInt = 1
    pool_size: PositiveInt = 3072
    pool_activation: ActivationName = "gelu_tanh"
    pool_eps: UnitFloat = 1e-6
    normalize: bool = True

    kind: ClassVar[str] = "embed_attended"
    paper: ClassVar[str] = "Zhai et al. 2023 (SigLIP)"
    pooling: ClassVar[str] = "mean"  # reads all patches

    @classmethod
    def examples(cls) -> tuple["EmbedAttendedConfig", ...]:
        return cls(pool_size=6), cls(pool_heads=2, pool_size=6, normalize=False)

    def build(self, shape: HeadShape) -> "EmbedAttended":
        return EmbedAttended(shape.hidden_size, self)


class EmbedAttended(Head):
    """A head with predictions [B, E] and no labels."""

    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: EmbedAttendedConfig):
        super().__init__()
        if hidden_size % config.pool_heads:
            raise InputError(
                f"head.pool_heads: expected a divisor of the width {hidden_size}, got {config.pool_heads}"
            )
        self.config = config
        self.probe = nn.Embedding(1, hidden_size)
        self.query, self.key, self.value, self.output = (Linear(hidden_size, hidden_size) for _ in range(4))
        self.pool_norm = LayerNorm(hidden_size, eps=config.pool_eps)
        inner = DenseConfig(intermediate_size=config.pool_size, activation=config.pool_activation)
        self.pool_feedforward = inner.build(hidden_size)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute y + mlp(norm(y)) for y = attention(p, h, h), at length 1 if `normalize`."""
        refuse_labels(labels, self.config.kind)
        hidden, heads = inputs.hidden, self.config.pool_heads
        rows, length, _ = hidden.shape
        if not length:
            raise InputError("input_ids: pooling needs at least 1 token per text, got none")
        probe = self.query(self.probe.weight).expand(rows, 1, -1)
        parts = (probe, self.key(hidden), self.value(hidden))
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        # with a single query the scores are few, and the definition also has second-order gradients
        read = attend(q, k, v, context=Context(1, length, kv_valid=inputs.mask), backend="definition")
        y = self.output(read.transpose(1, 2).flatten(2)).squeeze(1)
        vector = y + self.pool_feedforward(self.pool_norm(y))
        return None, lambda: F.normalize(vector, dim=-1) if self.config.normalize else vector
