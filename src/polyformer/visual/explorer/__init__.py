"""The explorer: one page, without network access, which shows a model's attention on a text."""

from polyformer.visual.explorer.explore import page_of
from polyformer.visual.explorer.notebook import Explorer, explore
from polyformer.visual.explorer.reading import Picture, Reading

__all__ = ["Explorer", "Picture", "Reading", "explore", "page_of"]
