"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import bert

__all__ = ["bert"]
