"""Attention mechanisms and the patterns that compose: `Window(256) | Global(1)`."""

from polyformer.attention.etc import ETC
from polyformer.attention.global_tokens import Global
from polyformer.attention.marked import Marked
from polyformer.attention.image_blocks import Local1D, Local2D
from polyformer.attention.per_head import PerHead, PerLayer
from polyformer.attention.softmax_attention import SoftmaxConfig
from polyformer.attention.window import Window
from polyformer.core.pattern import Pattern
from polyformer.core.patterns import Causal, Documents, Full, Padding

__all__ = [
    "ETC",
    "Causal",
    "Documents",
    "Full",
    "Global",
    "Local1D",
    "Local2D",
    "Marked",
    "Padding",
    "Pattern",
    "PerHead",
    "PerLayer",
    "SoftmaxConfig",
    "Window",
]
