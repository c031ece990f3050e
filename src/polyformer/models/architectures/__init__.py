"""Whole models: a `Transformer` reads tokens; other models read images, recorded steps or observations."""

from polyformer.models.architectures.model_types import (
    AnyConfig,
    AnyModel,
    build_model,
    decode_config,
    load_pretrained,
    read_config,
)
from polyformer.models.architectures.policy import Policy, PolicyConfig, PolicyOutput
from polyformer.models.architectures.towers import TowersConfig, TowersOutput, TwoTowers
from polyformer.models.architectures.trajectory import (
    PredictionConfig,
    TrajectoryConfig,
    TrajectoryOutput,
    TrajectoryTransformer,
)
from polyformer.models.architectures.transformer import Transformer
from polyformer.models.architectures.two_streams import TwoStreams
from polyformer.models.architectures.vision import VisionConfig, VisionTransformer
from polyformer.models.architectures.zero_memory import zero_memory

__all__ = [
    "AnyConfig",
    "AnyModel",
    "Policy",
    "PolicyConfig",
    "PolicyOutput",
    "PredictionConfig",
    "TowersConfig",
    "TowersOutput",
    "TrajectoryConfig",
    "TrajectoryOutput",
    "TrajectoryTransformer",
    "Transformer",
    "TwoStreams",
    "TwoTowers",
    "VisionConfig",
    "VisionTransformer",
    "build_model",
    "decode_config",
    "load_pretrained",
    "read_config",
    "zero_memory",
]
