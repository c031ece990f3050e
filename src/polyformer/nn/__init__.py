"""Parts of a model: feed-forward layers, blocks, stacks, heads, memories and adaptive depth."""

from typing import TYPE_CHECKING

from polyformer.core.imports import lazy_names

if TYPE_CHECKING:
    from polyformer.core.ops.layers import Dropout as Dropout
    from polyformer.core.ops.linear import Linear as Linear
    from polyformer.core.ops.linear import as_torch as as_torch
    from polyformer.nn.block import *
    from polyformer.nn.cache import *
    from polyformer.nn.depth import *
    from polyformer.nn.feedforward import *
    from polyformer.nn.heads import *
    from polyformer.nn.memory import *
    from polyformer.nn.stack import *

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Dropout": "polyformer.core.ops.layers",
        "Linear": "polyformer.core.ops.linear",
        "as_torch": "polyformer.core.ops.linear",
    },
    ["block", "cache", "depth", "feedforward", "heads", "memory", "stack"],
)
