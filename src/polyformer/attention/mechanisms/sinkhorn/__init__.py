"""Sinkhorn attention: blocks of keys are reordered by a learned soft permutation.

Read `definition` (the equations), then `sinkhorn` (configuration and module), `sort_cut` (the truncated
form), `balancing` (the permutation) and `blocks` (the block of each token).
"""

from polyformer.attention.mechanisms.sinkhorn.sinkhorn import SinkhornConfig
from polyformer.attention.mechanisms.sinkhorn.sort_cut import SortCutConfig

__all__ = ["SinkhornConfig", "SortCutConfig"]
