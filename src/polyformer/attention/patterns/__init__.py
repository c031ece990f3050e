"""Attention patterns and their algebra: `Window(256) | Global(1)`."""

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.between_sequences import Aligned, SourceSpans, WaitK
from polyformer.attention.patterns.block_diffusion import BlockDiffusion
from polyformer.attention.patterns.blocks import BlockWindow, Blockwise, Fixed, Links, Random, Summary
from polyformer.attention.patterns.composition import And, Or, PerHead, PerLayer, Without
from polyformer.attention.patterns.etc import ETC
from polyformer.attention.patterns.global_tokens import Global, GlobalEnd, Marked, Prefix, Whole
from polyformer.attention.patterns.image_blocks import Local1D, Local2D, Neighbourhood
from polyformer.attention.patterns.implied import Causal, Documents, Full, Padding
from polyformer.attention.patterns.windows import ByDistance, Strided, Window
from polyformer.core.registry import import_modules

__all__ = [
    "ETC",
    "Aligned",
    "And",
    "BlockDiffusion",
    "BlockWindow",
    "Blockwise",
    "ByDistance",
    "Causal",
    "Documents",
    "Fixed",
    "Full",
    "Global",
    "GlobalEnd",
    "Links",
    "Local1D",
    "Local2D",
    "Marked",
    "Neighbourhood",
    "Or",
    "Padding",
    "Pattern",
    "PerHead",
    "PerLayer",
    "Prefix",
    "Random",
    "SourceSpans",
    "Strided",
    "Summary",
    "WaitK",
    "Whole",
    "Window",
    "Without",
]

import_modules(__name__)
