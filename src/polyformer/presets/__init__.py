"""Sizes and choices, one file a family."""

from polyformer.presets import (
    albert,
    bart,
    bigbird,
    deberta,
    decoder,
    distilbert,
    electra,
    encoder,
    etc,
    longformer,
    memory_compressed,
    roberta,
    t5,
    transformer,
)
from polyformer.presets.base import (
    MODELS,
    create_model,
    list_models,
    model_config,
    overridden,
    register,
)

__all__ = [
    "MODELS",
    "albert",
    "bart",
    "bigbird",
    "create_model",
    "deberta",
    "decoder",
    "distilbert",
    "electra",
    "encoder",
    "etc",
    "list_models",
    "longformer",
    "memory_compressed",
    "model_config",
    "overridden",
    "register",
    "roberta",
    "t5",
    "transformer",
]
