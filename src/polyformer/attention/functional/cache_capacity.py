"""The number of values to compute together when a table is computed in parts."""

from torch import Tensor

from polyformer.core.ops.tuning import core_cache

ON_ACCELERATOR = 1 << 26
"""Values per part on an accelerator, limited by its memory instead of its caches."""


def cache_capacity(like: Tensor) -> int:
    """Return the number of values like `like` in a core's private cache; more on an accelerator.

    With half or twice this number, times differ by at most a tenth. Results depend on the parts only by
    rounding.
    """
    return core_cache() // like.element_size() if like.device.type == "cpu" else ON_ACCELERATOR
