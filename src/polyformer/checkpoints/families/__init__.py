"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import bert, deberta, gpt2

__all__ = ["bert", "deberta", "gpt2"]
