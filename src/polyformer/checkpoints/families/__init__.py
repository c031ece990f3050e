"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import (
    albert,
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
    "albert",
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
