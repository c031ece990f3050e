"""Blocks: the wirings of the sub-layers of a layer."""

from polyformer.core.registry import import_modules
from polyformer.nn.block.hyper_connections import HyperConnectionsConfig
from polyformer.nn.block.layer_scale import LayerScaleConfig
from polyformer.nn.block.wirings import (
    Block,
    BlockConfig,
    ParallelConfig,
    PostNormConfig,
    PreNormConfig,
    Reversible,
    ReversibleConfig,
    SandwichConfig,
    SubLayer,
    merge_streams,
    split_streams,
)

__all__ = [
    "Block",
    "BlockConfig",
    "HyperConnectionsConfig",
    "LayerScaleConfig",
    "ParallelConfig",
    "PostNormConfig",
    "PreNormConfig",
    "Reversible",
    "ReversibleConfig",
    "SandwichConfig",
    "SubLayer",
    "merge_streams",
    "split_streams",
]

import_modules(__name__)
