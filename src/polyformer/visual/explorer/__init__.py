"""The explorer: one page, without a network, on which a model's attention on a text is seen."""

from polyformer.visual.explorer.explore import Reading, explore

__all__ = ["Reading", "explore"]
