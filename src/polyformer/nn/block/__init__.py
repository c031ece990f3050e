"""Blocks: the wirings of the sub-layers of a layer."""

from polyformer.core.registry import import_modules
from polyformer.nn.block.base import Block, BlockConfig, SubLayer
from polyformer.nn.block.parallel import ParallelConfig
from polyformer.nn.block.post import PostNormConfig
from polyformer.nn.block.pre import PreNormConfig
from polyformer.nn.block.reversible import Reversible, ReversibleConfig, merge_streams, split_streams
from polyformer.nn.block.sandwich import SandwichConfig

__all__ = [
    "Block",
    "BlockConfig",
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
