"""polyformer: the whole Transformer family as parts that compose.

Names are loaded when they are first used, so that the command line answers before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyformer.architecture import ModelConfig
    from polyformer.attention import (
        ETC,
        BlockWindow,
        Blockwise,
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
        Window,
    )
    from polyformer.checkpoints import from_pretrained
    from polyformer.core.attend import attend, explain
    from polyformer.core.by_distance import ByDistance
    from polyformer.core.context import Context
    from polyformer.core.errors import InputError
    from polyformer.core.relative import Relative
    from polyformer.generation import GenerationConfig
    from polyformer.model import Transformer
    from polyformer.outputs import ModelOutput, ModelState
    from polyformer.presets import create_model, list_models, model_config, register

__version__ = "0.1.0"

_HOMES = {
    "attention": (
        "Blockwise",
        "BlockWindow",
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
        "Window",
    ),
    "checkpoints": ("from_pretrained",),
    "core.attend": ("attend", "explain"),
    "core.by_distance": ("ByDistance",),
    "core.context": ("Context",),
    "core.errors": ("InputError",),
    "core.relative": ("Relative",),
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
