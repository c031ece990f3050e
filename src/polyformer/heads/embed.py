"""Sentence embedding: one vector for a text, compared by its angle. Reimers and Gurevych 2019, section 3."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.pooling import check_pooling, pool
from polyformer.heads.base import Head, HeadConfig, HeadInput


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedConfig(HeadConfig):
    """The pooled hidden states, scaled to length 1 when `normalize`."""

    pooling: str = "mean"
    normalize: bool = True

    kind: ClassVar[str] = "embed"
    row: ClassVar[str] = "A3"
    paper: ClassVar[str] = "Reimers and Gurevych 2019, section 3"

    def __post_init__(self) -> None:
        check_pooling(self.pooling)

    @classmethod
    def examples(cls) -> tuple["EmbedConfig", ...]:
        return cls(), cls(pooling="first", normalize=False)

    def build(self, hidden_size: int, vocab_size: int, tied: bool) -> "Embed":
        return Embed(self)


class Embed(Head):
    """Predictions [B, E]; no labels."""

    def __init__(self, config: EmbedConfig):
        super().__init__()
        self.config = config

    def forward(self, inputs: HeadInput, labels: Tensor | None) -> tuple[Tensor | None, Callable[[], Tensor]]:
        if labels is not None:
            raise InputError("labels: an embedding head has no loss of its own; leave them out")
        vector = pool(inputs.hidden, inputs.mask, self.config.pooling)
        return None, lambda: F.normalize(vector, dim=-1) if self.config.normalize else vector
