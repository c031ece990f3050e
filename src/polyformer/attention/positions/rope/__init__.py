"""Rotary positions, and their extensions to texts longer than in training."""

from polyformer.attention.positions.rope.context_extension import RopeExtensionConfig
from polyformer.attention.positions.rope.rope import RopeConfig

__all__ = ["RopeConfig", "RopeExtensionConfig"]
