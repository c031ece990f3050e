"""polyformer: the whole Transformer family as parts that compose."""

from polyformer.attention import Causal, Documents, Full, Global, Padding, Pattern, Window
from polyformer.core.attend import attend, explain
from polyformer.core.context import Context
from polyformer.core.errors import InputError
from polyformer.generation import GenerationConfig
from polyformer.model import ModelConfig, Transformer
from polyformer.outputs import ModelOutput, ModelState
from polyformer.presets import create_model, list_models, model_config, register

__version__ = "0.1.0"

from_pretrained = Transformer.from_pretrained

__all__ = [
    "Causal",
    "Context",
    "Documents",
    "Full",
    "GenerationConfig",
    "Global",
    "InputError",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "Padding",
    "Pattern",
    "Transformer",
    "Window",
    "attend",
    "create_model",
    "explain",
    "from_pretrained",
    "list_models",
    "model_config",
    "register",
]
