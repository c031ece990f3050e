"""The members that tests run over: those of the library, not those that other tests define and register."""

from collections.abc import Mapping
from typing import TypeVar

from polyformer.core.registry import in_package

T = TypeVar("T", bound=type)


def registered(registry: Mapping[str, T]) -> list[T]:
    """The classes of a registry that tests have not defined themselves."""
    return [cls for cls in registry.values() if in_package(cls)]
