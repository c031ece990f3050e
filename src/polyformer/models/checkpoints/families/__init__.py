"""The families: tables of options, tensors and heads; close relatives share a file."""

from polyformer.core.registry import import_modules

import_modules(__name__)
