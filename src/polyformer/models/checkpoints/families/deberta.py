"""DeBERTa, the first version. He et al. 2021.

It has queries, keys and values head by head in one matrix, and its keys have no bias.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.models.checkpoints.families.deberta_common import (
    POSITION_KEYS,
    POSITION_OPTIONS,
    POSITION_QUERIES,
    SELF,
    TRUNK,
    DebertaFamily,
    options,
)
from polyformer.models.checkpoints.family import register
from polyformer.models.checkpoints.key_mapping import Converter, Link, layered
from polyformer.models.config import ModelConfig
from polyformer.models.presets import model_config


@dataclasses.dataclass(frozen=True)
class Interleaved(Converter):
    """Query, key and value of each head in turn: [H 3 D, E]."""

    heads: int = 1

    def split(self, theirs: Tensor) -> Sequence[Tensor]:
        """Split [H 3 D, E] into 3 tensors [H D, E]."""
        projections = theirs.unflatten(0, (self.heads, len(self.ours), -1))
        return [projection.flatten(0, 1) for projection in projections.unbind(1)]

    def join(self, ours: Sequence[Tensor]) -> Tensor:
        """Join 3 tensors [H D, E] to [H 3 D, E]."""
        heads = [projection.unflatten(0, (self.heads, -1)) for projection in ours]
        return torch.stack(heads, 1).flatten(0, 2)


LAYER = {
    "attention.self.in_proj": Interleaved(("attention.query", "attention.key", "attention.value")),
    "attention.self.q_bias": "attention.query.bias",
    "attention.self.v_bias": "attention.value.bias",
}


@register
class Deberta(DebertaFamily):
    """The first version of DeBERTa, with interleaved projections of queries, keys and values."""

    model_type = "deberta"
    class_prefix = "Deberta"
    paper = "He et al. 2021"
    template = model_config("deberta-base")
    config_mapping = options(vocab_size=50265)
    other_options = POSITION_OPTIONS
    key_mapping: ClassVar = {
        **TRUNK,
        **layered("encoder.layer.{i}", "encoder.layers.{i}", LAYER),
        f"{SELF}.pos_proj": POSITION_KEYS,
        f"{SELF}.pos_q_proj": POSITION_QUERIES,
    }
    sizes = ("deberta-base",)

    def links(self, config: ModelConfig, task: str, own: Mapping[str, Any]) -> list[Link]:
        """Return the links as for every version, with the number of heads that are interleaved."""
        assert config.encoder is not None
        heads = config.encoder.attention.num_attention_heads
        return [
            Link(link.theirs, dataclasses.replace(link.converter, heads=heads))
            if isinstance(link.converter, Interleaved)
            else link
            for link in super().links(config, task, own)
        ]
