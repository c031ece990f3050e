"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import (
    bert,
    ctrl,
    deberta,
    distilbert,
    gpt,
    gpt2,
    gpt_neo,
    gptj,
    longformer,
    roberta,
    t5,
    xlm_roberta,
)

__all__ = [
    "bert",
    "ctrl",
    "deberta",
    "distilbert",
    "gpt",
    "gpt2",
    "gpt_neo",
    "gptj",
    "longformer",
    "roberta",
    "t5",
    "xlm_roberta",
]
