"""Decision Transformers. Chen et al. 2021, appendix A (the sizes for Atari and for OpenAI Gym).

State and action sizes are the defaults of transformers' configuration until a task's data override them.
"""

from typing import Any

from polyformer.models.architectures import TrajectoryConfig
from polyformer.models.presets.base import overridden, register_sizes

ATARI = {
    "head.bounded": False,
    "head.action_size": 18,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "activation": "gelu",
}
"""Overrides for Atari. A linear layer reads states: the paper's convolutions over frames are not included."""

TINY = {"hidden_size": 32, "max_timesteps": 128, "num_hidden_layers": 1, "intermediate_size": 64}
SIZES = {
    "dt-gym": (({},), "OpenAI Gym: 3 layers of 128, one head (Chen et al. 2021, appendix A)"),
    "dt-atari": ((ATARI,), "Atari: 6 layers of 128, 8 heads, 18 actions (Chen et al. 2021, appendix A)"),
    "dt-tiny": ((TINY,), "tests: one layer of 32, episodes of at most 128 steps"),
}


@register_sizes("Decision Transformer for {}.", SIZES)
def decision_transformer(options: dict[str, Any]) -> TrajectoryConfig:
    """Return the sizes for OpenAI Gym with these overrides."""
    return overridden(TrajectoryConfig(), options)
