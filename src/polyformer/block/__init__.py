"""Blocks: the wirings of the sub-layers of a layer."""

from polyformer.block.base import Block, BlockConfig, SubLayer
from polyformer.block.parallel import ParallelConfig
from polyformer.block.post import PostNormConfig
from polyformer.block.pre import PreNormConfig
from polyformer.block.reversible import Reversible, ReversibleConfig, merge_streams, streams
from polyformer.core.registry import import_modules

__all__ = [
    "Block",
    "BlockConfig",
    "ParallelConfig",
    "PostNormConfig",
    "PreNormConfig",
    "Reversible",
    "ReversibleConfig",
    "SubLayer",
    "merge_streams",
    "streams",
]

import_modules(__name__)
