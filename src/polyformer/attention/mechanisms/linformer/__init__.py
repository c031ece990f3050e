"""Linformer: keys and values are projected along the sequence, from n tokens to k rows, before attention.

Read `definition` (the equation over all columns), then `linformer` (configuration and module) and
`length_projections` (E and F: a matrix, pools, a convolution).
"""

from polyformer.attention.mechanisms.linformer.linformer import LinformerConfig

__all__ = ["LinformerConfig"]
