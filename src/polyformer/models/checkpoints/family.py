"""A family of public models, which loads and saves by its tables, and the registry of all families."""

from polyformer.core.registry import Registry
from polyformer.models.checkpoints.config_conversion import ConfigConversion
from polyformer.models.checkpoints.key_conversion import KeyConversion
from polyformer.models.checkpoints.tables import Task

__all__ = ["FAMILIES", "Family", "Task", "register"]


class Family(ConfigConversion, KeyConversion):
    """A family of public models: a subclass defines the tables (`tables.FamilyTables`)."""


FAMILIES: Registry[Family] = Registry("model_type")
"""The families by transformers' model_type."""


def register(family: type[Family]) -> type[Family]:
    """Register a family under its model_type."""
    FAMILIES.register(family.model_type)(family())
    return family
