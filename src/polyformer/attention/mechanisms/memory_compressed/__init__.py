"""Memory-compressed attention: a strided convolution reduces the number of keys and values.

Read `definition` (slot by slot), then `memory_compressed` (configuration and module) and `compression` (the
tokens of each slot, and the queries that attend to it).
"""

from polyformer.attention.mechanisms.memory_compressed.memory_compressed import MemoryCompressedConfig

__all__ = ["MemoryCompressedConfig"]
