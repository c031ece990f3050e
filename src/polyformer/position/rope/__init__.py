"""Rotary positions, and what extends them to texts longer than a model was trained on."""

from polyformer.position.rope.context_extension import RopeExtensionConfig
from polyformer.position.rope.rope import RopeConfig

__all__ = ["RopeConfig", "RopeExtensionConfig"]
