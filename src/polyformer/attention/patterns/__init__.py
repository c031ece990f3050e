"""Attention patterns and their algebra: `Window(256) | Global(1)`."""

from polyformer.attention.patterns.aligned import Aligned
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.block_window import BlockWindow
from polyformer.attention.patterns.blockwise import Blockwise
from polyformer.attention.patterns.by_distance import ByDistance
from polyformer.attention.patterns.composition import And, Or, Without
from polyformer.attention.patterns.etc import ETC
from polyformer.attention.patterns.fixed import Fixed, Summary
from polyformer.attention.patterns.global_end import GlobalEnd
from polyformer.attention.patterns.global_tokens import Global
from polyformer.attention.patterns.image_blocks import Local1D, Local2D, Neighbourhood
from polyformer.attention.patterns.implied import Causal, Documents, Full, Padding
from polyformer.attention.patterns.links import Links
from polyformer.attention.patterns.marked import Marked
from polyformer.attention.patterns.per_head import PerHead, PerLayer
from polyformer.attention.patterns.prefix import Prefix
from polyformer.attention.patterns.random_blocks import Random
from polyformer.attention.patterns.short_documents import Whole
from polyformer.attention.patterns.source_spans import SourceSpans
from polyformer.attention.patterns.strided import Strided
from polyformer.attention.patterns.wait_k import WaitK
from polyformer.attention.patterns.window import Window
from polyformer.core.registry import import_modules

__all__ = [
    "ETC",
    "Aligned",
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
