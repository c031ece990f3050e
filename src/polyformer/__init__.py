"""polyformer: the Transformer family as composable parts.

Names are imported lazily, so that the command line starts without importing torch.
"""

from typing import TYPE_CHECKING

from polyformer.core import __version__ as __version__
from polyformer.core.imports import lazy_names

if TYPE_CHECKING:
    from polyformer.applications.audit import audit as audit
    from polyformer.applications.interventions import trace as trace
    from polyformer.applications.loaded import LoadedModel as LoadedModel
    from polyformer.applications.loaded import load as load
    from polyformer.attention.functional.attend import attend as attend
    from polyformer.attention.functional.relative import Relative as Relative
    from polyformer.attention.patterns import *
    from polyformer.core.errors import InputError as InputError
    from polyformer.core.sequence.context import Context as Context
    from polyformer.core.sequence.context_parallel import context_parallel as context_parallel
    from polyformer.models.architectures import Transformer as Transformer
    from polyformer.models.attached import attach as attach
    from polyformer.models.attached import detach as detach
    from polyformer.models.attached import explain as explain
    from polyformer.models.checkpoints import from_pretrained as from_pretrained
    from polyformer.models.config import ModelConfig as ModelConfig
    from polyformer.models.generation import GenerationConfig as GenerationConfig
    from polyformer.models.generation.kept_text import KeptText as KeptText
    from polyformer.models.generation.saved_text import load_state as load_state
    from polyformer.models.generation.saved_text import save_state as save_state
    from polyformer.models.outputs import ModelOutput as ModelOutput
    from polyformer.models.outputs import ModelState as ModelState
    from polyformer.models.presets import create_model as create_model
    from polyformer.models.presets import list_models as list_models
    from polyformer.models.presets import model_config as model_config
    from polyformer.models.presets import register as register
    from polyformer.training.recipes import Recipe as Recipe
    from polyformer.training.recipes import fit as fit

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Context": "core.sequence.context",
        "GenerationConfig": "models.generation",
        "InputError": "core.errors",
        "KeptText": "models.generation.kept_text",
        "LoadedModel": "applications.loaded",
        "ModelConfig": "models.config",
        "ModelOutput": "models.outputs",
        "ModelState": "models.outputs",
        "Recipe": "training.recipes",
        "Relative": "attention.functional.relative",
        "Transformer": "models.architectures",
        "attach": "models.attached",
        "attend": "attention.functional.attend",
        "audit": "applications.audit",
        "context_parallel": "core.sequence.context_parallel",
        "create_model": "models.presets",
        "detach": "models.attached",
        "explain": "models.attached",
        "fit": "training.recipes",
        "from_pretrained": "models.checkpoints",
        "list_models": "models.presets",
        "load": "applications.loaded",
        "load_state": "models.generation.saved_text",
        "model_config": "models.presets",
        "register": "models.presets",
        "save_state": "models.generation.saved_text",
        "trace": "applications.interventions",
    },
    ["attention.patterns"],
)
