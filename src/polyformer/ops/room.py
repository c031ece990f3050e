"""How many numbers are computed together, where a table is made part by part."""

from torch import Tensor

from polyformer.ops.tuning.machine import core_cache

ON_ACCELERATOR = 1 << 26
"""Numbers of a part on an accelerator: a matter of its memory, not of its caches."""


def room(like: Tensor) -> int:
    """Numbers of the precision of `like` that a core's own cache holds; more on an accelerator.

    With half or twice as many, times differ by a tenth at most. What is computed part by part depends on
    the parts by rounding alone.
    """
    return core_cache() // like.element_size() if like.device.type == "cpu" else ON_ACCELERATOR
