"""Sentence embeddings: a vector for a text, compared by angles. Reimers and Gurevych 2019, section 3."""

import dataclasses
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.layers import ActivationName, Pooling, activation, pool
from polyformer.core.ops.linear import Linear
from polyformer.nn.heads.base import Head, HeadConfig, HeadInput, HeadOutput, HeadShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedConfig(HeadConfig):
    """Sentence embedding head: one vector represents a whole text.

    The vector is the pooled hidden states, scaled to length 1 if `normalize`; `hidden` adds BERT's pooler, a
    layer with an activation, before.
    """

    pooling: Pooling = "mean"
    hidden: bool = False
    activation: ActivationName = "tanh"  # of that layer
    normalize: bool = True

    kind: ClassVar[str] = "embed"
    paper: ClassVar[str] = "Reimers and Gurevych 2019, section 3"

    def reusable_modules(self) -> dict[str, str]:
        """Return the layer after pooling as BERT's pooler."""
        return {"pooler": "dense"} if self.hidden else {}

    @classmethod
    def examples(cls) -> tuple["EmbedConfig", ...]:
        return cls(), cls(pooling="first", normalize=False, hidden=True)

    def build(self, shape: HeadShape) -> "Embed":
        """Return the head, which has weights only if `hidden`: a linear layer E -> E."""
        return Embed(shape.hidden_size, self)


class Embed(Head):
    """A head with predictions [B, E] and no labels."""

    supports_vocabulary_parallel = True

    def __init__(self, hidden_size: int, config: EmbedConfig):
        super().__init__()
        self.config = config
        self.dense = Linear(hidden_size, hidden_size) if config.hidden else None
        self.activation = activation(config.activation)

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> HeadOutput:
        """Compute v / |v| for v = pool(h), or for act(W pool(h)) if `hidden`."""
        if labels is not None:
            raise InputError("labels: the head 'embed' has no loss; leave labels out")
        # [B, E], one vector per text.
        vector = pool(inputs.hidden, inputs.mask, self.config.pooling)
        if self.dense is not None:
            vector = self.activation(self.dense(vector))
        # At length 1 a product of two vectors is the cosine of their angle.
        return None, lambda: F.normalize(vector, dim=-1) if self.config.normalize else vector
