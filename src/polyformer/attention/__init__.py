"""Attention mechanisms and the patterns that compose: `Window(256) | Global(1)`."""

from polyformer.attention.adaptive_span import AdaptiveSpanConfig
from polyformer.attention.alternate import AlternateConfig
from polyformer.attention.block_window import BlockWindow
from polyformer.attention.blockwise import Blockwise
from polyformer.attention.dynamic_span import DynamicSpanConfig
from polyformer.attention.etc import ETC
from polyformer.attention.fixed import Fixed, Summary
from polyformer.attention.global_end import GlobalEnd
from polyformer.attention.global_tokens import Global
from polyformer.attention.image_blocks import Local1D, Local2D
from polyformer.attention.linformer import LinformerConfig
from polyformer.attention.links import Links
from polyformer.attention.lsh import LSHConfig
from polyformer.attention.marked import Marked
from polyformer.attention.memory_compressed import MemoryCompressedConfig
from polyformer.attention.per_head import PerHead, PerLayer
from polyformer.attention.performer import PerformerConfig
from polyformer.attention.random_blocks import Random
from polyformer.attention.rfa import RFAConfig
from polyformer.attention.routing import RoutingConfig
from polyformer.attention.softmax_attention import SoftmaxConfig
from polyformer.attention.strided import Strided
from polyformer.attention.svd import SVDConfig
from polyformer.attention.whole import Whole
from polyformer.attention.window import Window
from polyformer.core.pattern import Pattern
from polyformer.core.patterns import Causal, Documents, Full, Padding

__all__ = [
    "ETC",
    "AdaptiveSpanConfig",
    "AlternateConfig",
    "BlockWindow",
    "Blockwise",
    "Causal",
    "Documents",
    "DynamicSpanConfig",
    "Fixed",
    "Full",
    "Global",
    "GlobalEnd",
    "LSHConfig",
    "LinformerConfig",
    "Links",
    "Local1D",
    "Local2D",
    "Marked",
    "MemoryCompressedConfig",
    "Padding",
    "Pattern",
    "PerHead",
    "PerLayer",
    "PerformerConfig",
    "RFAConfig",
    "Random",
    "RoutingConfig",
    "SVDConfig",
    "SoftmaxConfig",
    "Strided",
    "Summary",
    "Whole",
    "Window",
]
