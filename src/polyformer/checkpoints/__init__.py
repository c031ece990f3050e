"""Public checkpoints: families of models in the layout of the hub, read and written."""

import polyformer.checkpoints.families  # noqa: F401  (fills the registry)
from polyformer.checkpoints.family import FAMILIES, Family
from polyformer.checkpoints.load import from_pretrained, from_transformers
from polyformer.checkpoints.save import save

__all__ = ["FAMILIES", "Family", "from_pretrained", "from_transformers", "save"]
