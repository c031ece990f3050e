"""Adaptive depth: policies for the number of layers of each token; each file implements a policy."""

from polyformer.core.registry import import_modules
from polyformer.nn.depth.active import Active
from polyformer.nn.depth.base import Call, Depth, DepthConfig, Halting, Judge
from polyformer.nn.depth.fixed import FixedConfig
from polyformer.nn.depth.recording import recorded_depths, recorded_states, whole_depth

__all__ = [
    "Active",
    "Call",
    "Depth",
    "DepthConfig",
    "FixedConfig",
    "Halting",
    "Judge",
    "recorded_depths",
    "recorded_states",
    "whole_depth",
]

import_modules(__name__)
