"""polyformer: the whole Transformer family as parts that compose.

Names are loaded when they are first used, so that the command line answers before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, for type checkers and editors; a test compares the two lists
    from polyformer.architecture import ModelConfig as ModelConfig
    from polyformer.checkpoints import from_pretrained as from_pretrained
    from polyformer.core.errors import InputError as InputError
    from polyformer.dot_product.attend import attend as attend
    from polyformer.dot_product.relative import Relative as Relative
    from polyformer.generation import GenerationConfig as GenerationConfig
    from polyformer.inside.attach import attach as attach
    from polyformer.inside.attach import detach as detach
    from polyformer.inside.explain import explain as explain
    from polyformer.model import Transformer as Transformer
    from polyformer.outputs import ModelOutput as ModelOutput
    from polyformer.outputs import ModelState as ModelState
    from polyformer.patterns import *
    from polyformer.presets import create_model as create_model
    from polyformer.presets import list_models as list_models
    from polyformer.presets import model_config as model_config
    from polyformer.presets import register as register
    from polyformer.sequence.context import Context as Context
    from polyformer.sequence.spread import spread_over as spread_over

__version__ = "0.1.0"

_HOMES = {
    "Context": "sequence.context",
    "GenerationConfig": "generation",
    "InputError": "core.errors",
    "ModelConfig": "architecture",
    "ModelOutput": "outputs",
    "ModelState": "outputs",
    "Relative": "dot_product.relative",
    "Transformer": "model",
    "attach": "inside.attach",
    "attend": "dot_product.attend",
    "create_model": "presets",
    "detach": "inside.attach",
    "explain": "inside.explain",
    "from_pretrained": "checkpoints",
    "list_models": "presets",
    "model_config": "presets",
    "register": "presets",
    "spread_over": "sequence.spread",
}
"""The module that each public name is in; all others are patterns, which polyformer.patterns lists."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"polyformer.{_HOMES[name]}"), name)
    if name == "__all__":
        return [*_HOMES, *_patterns()]
    if name.startswith("_") or name not in _patterns():
        raise AttributeError(f"module 'polyformer' has no attribute {name!r}")
    return getattr(importlib.import_module("polyformer.patterns"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_patterns()])


def _patterns() -> list[str]:
    """The names of patterns; asking for them imports torch."""
    return importlib.import_module("polyformer.patterns").__all__
