"""Pictures and pages that show models, patterns and position schemes."""

from typing import TYPE_CHECKING

from polyformer.core.imports import lazy_names

if TYPE_CHECKING:
    from polyformer.cli.plots.explorer import explore as explore

__getattr__, __dir__ = lazy_names(__name__, {"explore": "explorer"})
