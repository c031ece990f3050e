"""Whole models: architectures, presets, checkpoints, generation, and both directions of use with
transformers.

`transformers` wraps our models for transformers (AutoModel, pipeline, Trainer); `attached` runs our attention
in the layers of models of transformers.
"""

from typing import TYPE_CHECKING

from polyformer.core.imports import lazy_names

if TYPE_CHECKING:
    from polyformer.models.architectures import *
    from polyformer.models.attached import attach as attach
    from polyformer.models.attached import detach as detach
    from polyformer.models.attached import explain as explain
    from polyformer.models.checkpoints import *
    from polyformer.models.config import ModelConfig as ModelConfig
    from polyformer.models.export import *
    from polyformer.models.generation import *
    from polyformer.models.outputs import ModelOutput as ModelOutput
    from polyformer.models.outputs import ModelState as ModelState
    from polyformer.models.presets import *

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ModelConfig": "config",
        "ModelOutput": "outputs",
        "ModelState": "outputs",
        "attach": "attached",
        "detach": "attached",
        "explain": "attached",
    },
    ["architectures", "checkpoints", "export", "generation", "presets"],
)
