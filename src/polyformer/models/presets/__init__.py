"""Sizes and choices of known models, one table of sizes and one builder per family."""

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
