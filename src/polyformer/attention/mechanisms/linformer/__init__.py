"""Linformer: keys and values are projected along the sequence, from n tokens to k rows, before attention.

Read `linformer` (configuration and module), then `length_projections` (E and F: a matrix, pools, a
convolution, each with its equation over all columns).
"""

from polyformer.attention.mechanisms.linformer.linformer import LinformerConfig

__all__ = ["LinformerConfig"]
