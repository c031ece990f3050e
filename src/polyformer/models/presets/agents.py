"""Agents: GTrXL and the policies of its comparison, and Decision Transformers.

Policies (Parisotto et al. 2019) have sizes for a CPU; the paper's model, `gtrxl-dmlab30`, trains for a
billion steps. Decision Transformers (Chen et al. 2021, appendix A) have the sizes for Atari and for OpenAI
Gym. The environment or the data of a task sets the sizes of observations and states, and the number of
actions; until then they are the defaults of transformers' configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyformer.models.architectures import PolicyConfig, TrajectoryConfig
from polyformer.models.architectures.policy import (
    DecoderTrunkConfig,
    FeedForwardTrunkConfig,
    LSTMTrunkConfig,
    TrunkConfig,
)
from polyformer.models.presets.base import Preset, overridden, register_presets

PUBLISHED = {
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "intermediate_size": 1024,
    "memory_length": 512,
}
"""Overrides for the sizes of the paper."""

POST_NORM = DecoderTrunkConfig().override("block", "post").override("intermediate_size", 196)
"""Transformer-XL's layers, for comparison with gated ones."""


@dataclass(frozen=True, kw_only=True)
class PolicyPreset(Preset):
    """A policy of this width around `trunk`; all for a CPU have about as many parameters."""

    width: int
    trunk: TrunkConfig

    def config(self) -> PolicyConfig:
        return PolicyConfig(hidden_size=self.width, trunk=self.trunk)


register_presets(
    # The paper counts 66.4M parameters, with the layers that read images.
    PolicyPreset(
        "gtrxl-dmlab30",
        "GTrXL policy: 12 layers of 512, 8 heads, a memory of 512 steps (Parisotto et al. 2019, section 4).",
        width=512,
        trunk=overridden(DecoderTrunkConfig(), PUBLISHED),
    ),
    PolicyPreset(
        "gtrxl",
        "GTrXL policy: 1 layer of 64, 2 heads, a memory of 32 steps (Parisotto et al. 2019, section 3).",
        width=64,
        trunk=DecoderTrunkConfig(),
    ),
    PolicyPreset(
        "policy-transformer-xl",
        "Transformer-XL policy for comparison with gtrxl: post-norm, without gates, of similar size.",
        width=98,
        trunk=POST_NORM,
    ),
    PolicyPreset(
        "policy-lstm",
        "LSTM policy for comparison with gtrxl, of similar size.",
        width=104,
        trunk=LSTMTrunkConfig(),
    ),
    PolicyPreset(
        "policy-feedforward",
        "Feed-forward policy for comparison with gtrxl: without a memory, of similar size.",
        width=206,
        trunk=FeedForwardTrunkConfig(),
    ),
)


@dataclass(frozen=True, kw_only=True)
class DecisionTransformerPreset(Preset):
    """The sizes for OpenAI Gym with these overrides."""

    changes: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> TrajectoryConfig:
        return overridden(TrajectoryConfig(), dict(self.changes))


ATARI = {
    "head.bounded": False,
    "head.action_size": 18,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "activation": "gelu",
}
"""Overrides for Atari. A linear layer reads states: the paper's convolutions over frames are not included."""

TINY = {"hidden_size": 32, "max_timesteps": 128, "num_hidden_layers": 1, "intermediate_size": 64}
"""Overrides for tests."""

register_presets(
    DecisionTransformerPreset(
        "dt-gym",
        "Decision Transformer for OpenAI Gym: 3 layers of 128, one head (Chen et al. 2021, appendix A).",
    ),
    DecisionTransformerPreset(
        "dt-atari",
        "Decision Transformer for Atari: 6 layers of 128, 8 heads, 18 actions "
        "(Chen et al. 2021, appendix A).",
        changes=ATARI,
    ),
    DecisionTransformerPreset(
        "dt-tiny",
        "Decision Transformer for tests: one layer of 32, episodes of at most 128 steps.",
        changes=TINY,
    ),
)
