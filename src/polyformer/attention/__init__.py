"""Attention: which keys each query attends to, how scores are computed, and what positions add.

`patterns` are the attention masks, `functional` computes softmax(q k^T) v for a pattern, `positions` are the
positional encodings, and `mechanisms` are the attention layers' kinds: softmax and its approximations.
"""

from typing import TYPE_CHECKING

from polyformer.core.imports import lazy_names

if TYPE_CHECKING:
    from polyformer.attention.functional.attend import attend as attend
    from polyformer.attention.functional.isolation import guarded as guarded
    from polyformer.attention.functional.relative import Relative as Relative
    from polyformer.attention.mechanisms import *
    from polyformer.attention.mechanisms.random_directions import directions as directions
    from polyformer.attention.patterns import *
    from polyformer.attention.positions import *
    from polyformer.core.ops.softmax import softmax as softmax
    from polyformer.core.sequence.context import Context as Context

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Context": "polyformer.core.sequence.context",
        "Relative": "functional.relative",
        "attend": "functional.attend",
        "directions": "polyformer.attention.mechanisms.random_directions",
        "guarded": "functional.isolation",
        "softmax": "polyformer.core.ops.softmax",
    },
    ["mechanisms", "patterns", "positions"],
)
