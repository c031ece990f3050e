"""The explorer: one page, without network access, which shows a model's attention on a text."""

from polyformer.cli.plots.explorer.explore import page_of
from polyformer.cli.plots.explorer.notebook import Explorer, explore
from polyformer.cli.plots.explorer.reading import Picture, Prediction, Reading

__all__ = ["Explorer", "Picture", "Prediction", "Reading", "explore", "page_of"]
