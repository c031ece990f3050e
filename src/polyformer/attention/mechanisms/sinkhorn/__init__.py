"""Sinkhorn attention: blocks of keys are reordered by a learned soft permutation.

Read `definition` (the permutation and the equations), then `sinkhorn` (configurations and modules) and
`blocks` (the block of each token).
"""

from polyformer.attention.mechanisms.sinkhorn.sinkhorn import SinkhornConfig, SortCutConfig

__all__ = ["SinkhornConfig", "SortCutConfig"]
