"""Attention patterns and their algebra: `Window(256) | Global(1)`."""

from polyformer.core.registry import import_modules
from polyformer.patterns.base import Pattern
from polyformer.patterns.block_window import BlockWindow
from polyformer.patterns.blockwise import Blockwise
from polyformer.patterns.by_distance import ByDistance
from polyformer.patterns.composition import And, Or, Without
from polyformer.patterns.etc import ETC
from polyformer.patterns.fixed import Fixed, Summary
from polyformer.patterns.global_end import GlobalEnd
from polyformer.patterns.global_tokens import Global
from polyformer.patterns.image_blocks import Local1D, Local2D
from polyformer.patterns.implied import Causal, Documents, Full, Padding
from polyformer.patterns.links import Links
from polyformer.patterns.marked import Marked
from polyformer.patterns.per_head import PerHead, PerLayer
from polyformer.patterns.random_blocks import Random
from polyformer.patterns.short_documents import Whole
from polyformer.patterns.strided import Strided
from polyformer.patterns.window import Window

__all__ = [
    "ETC",
    "And",
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
    "Or",
    "Padding",
    "Pattern",
    "PerHead",
    "PerLayer",
    "Random",
    "Strided",
    "Summary",
    "Whole",
    "Window",
    "Without",
]

import_modules(__name__)
