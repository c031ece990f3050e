"""Memories of the text before a segment; each file implements a memory."""

from polyformer.core.registry import import_modules
from polyformer.nn.memory.base import Memory, MemoryConfig, NoMemoryConfig
from polyformer.nn.memory.compressive import CompressiveConfig
from polyformer.nn.memory.memorizing import MemorizingConfig
from polyformer.nn.memory.recurrent import RecurrentConfig
from polyformer.nn.memory.sinks import SinksConfig

__all__ = [
    "CompressiveConfig",
    "MemorizingConfig",
    "Memory",
    "MemoryConfig",
    "NoMemoryConfig",
    "RecurrentConfig",
    "SinksConfig",
]

import_modules(__name__)
