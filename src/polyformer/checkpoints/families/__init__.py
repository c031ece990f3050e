"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import bert, gpt2

__all__ = ["bert", "gpt2"]
