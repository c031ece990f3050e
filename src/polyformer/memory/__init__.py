"""Memories of the text before a segment; each file implements a memory."""

from polyformer.core.registry import import_modules
from polyformer.memory.base import Memory, MemoryConfig
from polyformer.memory.compressive import CompressiveConfig
from polyformer.memory.memorizing import MemorizingConfig
from polyformer.memory.none import NoMemoryConfig
from polyformer.memory.recurrent import RecurrentConfig

__all__ = [
    "CompressiveConfig",
    "MemorizingConfig",
    "Memory",
    "MemoryConfig",
    "NoMemoryConfig",
    "RecurrentConfig",
]

import_modules(__name__)
