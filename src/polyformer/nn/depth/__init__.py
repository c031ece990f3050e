"""Adaptive depth: policies for the number of layers of each token; each file implements a policy."""

from polyformer.core.registry import import_modules
from polyformer.nn.depth.base import (
    Active,
    Depth,
    DepthConfig,
    DepthInput,
    ExitLoss,
    FixedConfig,
    Halting,
    full_depth,
    recorded_depths,
    recorded_states,
)

__all__ = [
    "Active",
    "Depth",
    "DepthConfig",
    "DepthInput",
    "ExitLoss",
    "FixedConfig",
    "Halting",
    "full_depth",
    "recorded_depths",
    "recorded_states",
]

import_modules(__name__)
