"""Memory-compressed attention: a strided convolution shortens keys and values."""

from polyformer.attention.memory_compressed.memory_compressed import MemoryCompressedConfig

__all__ = ["MemoryCompressedConfig"]
