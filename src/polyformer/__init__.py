"""polyformer: the whole Transformer family as parts that compose.

Names are loaded when they are first used, so that the command line answers before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyformer.architecture import ModelConfig
    from polyformer.checkpoints import from_pretrained
    from polyformer.core.errors import InputError
    from polyformer.dot_product.attend import attend, explain
    from polyformer.dot_product.relative import Relative
    from polyformer.generation import GenerationConfig
    from polyformer.model import Transformer
    from polyformer.outputs import ModelOutput, ModelState
    from polyformer.patterns import (
        ETC,
        BlockWindow,
        Blockwise,
        ByDistance,
        Causal,
        Documents,
        Fixed,
        Full,
        Global,
        GlobalEnd,
        Links,
        Local1D,
        Local2D,
        Marked,
        Padding,
        Pattern,
        PerHead,
        PerLayer,
        Random,
        Strided,
        Summary,
        Whole,
        Window,
    )
    from polyformer.presets import create_model, list_models, model_config, register
    from polyformer.sequence.context import Context

__version__ = "0.1.0"

_HOMES = {
    "patterns": (
        "Blockwise",
        "BlockWindow",
        "ByDistance",
        "Causal",
        "Documents",
        "ETC",
        "Fixed",
        "Full",
        "Global",
        "GlobalEnd",
        "Links",
        "Local1D",
        "Local2D",
        "Marked",
        "Padding",
        "Pattern",
        "PerHead",
        "PerLayer",
        "Random",
        "Strided",
        "Summary",
        "Whole",
        "Window",
    ),
    "checkpoints": ("from_pretrained",),
    "dot_product.attend": ("attend", "explain"),
    "sequence.context": ("Context",),
    "core.errors": ("InputError",),
    "dot_product.relative": ("Relative",),
    "generation": ("GenerationConfig",),
    "architecture": ("ModelConfig",),
    "model": ("Transformer",),
    "outputs": ("ModelOutput", "ModelState"),
    "presets": ("create_model", "list_models", "model_config", "register"),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"polyformer.{module}"), name)
    raise AttributeError(f"module 'polyformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
