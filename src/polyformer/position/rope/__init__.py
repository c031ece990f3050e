"""Rotary positions, and their extensions to texts longer than in training."""

from polyformer.position.rope.context_extension import RopeExtensionConfig
from polyformer.position.rope.rope import RopeConfig

__all__ = ["RopeConfig", "RopeExtensionConfig"]
