"""Whole models: a `Transformer` reads tokens; other models read images, recorded steps or observations."""

from polyformer.model.kinds import (
    AnyConfig,
    AnyModel,
    build_model,
    decode_config,
    load_pretrained,
    read_config,
)
from polyformer.model.policy import Policy, PolicyConfig, PolicyOutput
from polyformer.model.trajectory import (
    PredictionConfig,
    TrajectoryConfig,
    TrajectoryOutput,
    TrajectoryTransformer,
)
from polyformer.model.transformer import Transformer
from polyformer.model.vision import VisionConfig, VisionTransformer
from polyformer.model.zero_memory import zero_memory

__all__ = [
    "AnyConfig",
    "AnyModel",
    "Policy",
    "PolicyConfig",
    "PolicyOutput",
    "PredictionConfig",
    "TrajectoryConfig",
    "TrajectoryOutput",
    "TrajectoryTransformer",
    "Transformer",
    "VisionConfig",
    "VisionTransformer",
    "build_model",
    "decode_config",
    "load_pretrained",
    "read_config",
    "zero_memory",
]
