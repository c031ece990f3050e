"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import bert, deberta, gpt, gpt2, roberta, t5, xlm_roberta

__all__ = ["bert", "deberta", "gpt", "gpt2", "roberta", "t5", "xlm_roberta"]
