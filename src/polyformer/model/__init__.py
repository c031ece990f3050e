"""Whole models: the `Transformer`, which reads tokens, and the one for returns, states and actions."""

from polyformer.model.kinds import (
    AnyConfig,
    AnyModel,
    build_model,
    decode_config,
    load_pretrained,
    read_config,
)
from polyformer.model.trajectory import (
    PredictionConfig,
    TrajectoryConfig,
    TrajectoryOutput,
    TrajectoryTransformer,
)
from polyformer.model.transformer import Transformer
from polyformer.model.zero_memory import zero_memory

__all__ = [
    "AnyConfig",
    "AnyModel",
    "PredictionConfig",
    "TrajectoryConfig",
    "TrajectoryOutput",
    "TrajectoryTransformer",
    "Transformer",
    "build_model",
    "decode_config",
    "load_pretrained",
    "read_config",
    "zero_memory",
]
