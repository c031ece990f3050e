"""Sizes and choices of known models: a class for each family, and a row of named fields for each preset."""

from polyformer.core.registry import import_modules
from polyformer.models.presets.base import (
    MODELS,
    create_model,
    list_models,
    model_config,
    overridden,
    register,
)

__all__ = ["MODELS", "create_model", "list_models", "model_config", "overridden", "register"]

import_modules(__name__)
