"""Parts of a model: feed-forward layers, blocks, stacks, heads, memories and adaptive depth."""

from typing import TYPE_CHECKING

from polyformer.core.lazy import lazy_names

if TYPE_CHECKING:
    from polyformer.nn.block import *
    from polyformer.nn.depth import *
    from polyformer.nn.feedforward import *
    from polyformer.nn.heads import *
    from polyformer.nn.memory import *
    from polyformer.nn.stack import *

__getattr__, __dir__ = lazy_names(
    __name__,
    {},
    ["block", "depth", "feedforward", "heads", "memory", "stack"],
)
