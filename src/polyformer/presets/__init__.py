"""Sizes and choices, one file a family."""

from polyformer.presets import decoder, encoder, longformer, transformer
from polyformer.presets.base import MODELS, create_model, list_models, model_config, register

__all__ = [
    "MODELS",
    "create_model",
    "decoder",
    "encoder",
    "list_models",
    "longformer",
    "model_config",
    "register",
    "transformer",
]
