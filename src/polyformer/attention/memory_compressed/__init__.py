"""Memory-compressed attention: a strided convolution makes keys and values fewer.

Read `definition` (slot by slot), then `memory_compressed` (configuration and module) and `compression` (which
tokens a slot takes, and who attends to it).
"""

from polyformer.attention.memory_compressed.memory_compressed import MemoryCompressedConfig

__all__ = ["MemoryCompressedConfig"]
