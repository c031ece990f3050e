"""The members that tests run over: of the library and of installed packages, not those that tests define."""

from collections.abc import Mapping
from typing import TypeVar

from polyformer.core.entry_points import installed_modules
from polyformer.core.registry import in_package

T = TypeVar("T", bound=type)


def registered(registry: Mapping[str, T]) -> list[T]:
    """The classes of a registry that tests have not defined themselves."""
    return [cls for cls in registry.values() if in_package(cls) or _is_installed(cls)]


def _is_installed(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in installed_modules()
