"""The families, one file each: tables of options, tensors and heads."""

from polyformer.checkpoints.families import (
    albert,
    bart,
    bert,
    bigbird,
    ctrl,
    deberta,
    distilbert,
    electra,
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
    "bart",
    "bert",
    "bigbird",
    "ctrl",
    "deberta",
    "distilbert",
    "electra",
    "gpt",
    "gpt2",
    "gpt_neo",
    "gptj",
    "longformer",
    "roberta",
    "t5",
    "xlm_roberta",
]
