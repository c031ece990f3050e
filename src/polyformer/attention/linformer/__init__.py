"""Linformer: keys and values are projected along the sequence, from n tokens to k rows, before attention."""

from polyformer.attention.linformer.linformer import LinformerConfig

__all__ = ["LinformerConfig"]
