"""Decision Transformers. Chen et al. 2021, appendix A (the sizes for Atari and for OpenAI Gym).

State and action sizes are those of transformers' configuration until a task's data say others.
"""

import dataclasses

from polyformer.models.architectures import TrajectoryConfig
from polyformer.models.presets.base import register


@register("dt-gym")
def dt_gym() -> TrajectoryConfig:
    """Decision Transformer for OpenAI Gym: 3 layers of 128, one head (Chen et al. 2021, appendix A)."""
    return TrajectoryConfig()


@register("dt-atari")
def dt_atari() -> TrajectoryConfig:
    """Decision Transformer for Atari: 6 layers of 128, 8 heads, 18 actions (Chen et al. 2021, appendix A).

    States are read by a linear layer: the paper's convolutions over frames are no part of it.
    """
    config = TrajectoryConfig().override("head.bounded", False).override("head.action_size", 18)
    sizes = {"num_hidden_layers": 6, "num_attention_heads": 8, "activation": "gelu"}
    for name, value in sizes.items():
        config = config.override(name, value)
    return config


@register("dt-tiny")
def dt_tiny() -> TrajectoryConfig:
    """Decision Transformer for tests: one layer of 32, episodes of at most 128 steps."""
    config = dataclasses.replace(TrajectoryConfig(), hidden_size=32, max_timesteps=128)
    return config.override("num_hidden_layers", 1).override("intermediate_size", 64)
