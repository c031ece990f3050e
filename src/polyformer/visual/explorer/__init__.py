"""The explorer: one page, without a network, on which a model's attention on a text is seen."""

from polyformer.visual.explorer.explore import explore
from polyformer.visual.explorer.reading import Reading

__all__ = ["Reading", "explore"]
