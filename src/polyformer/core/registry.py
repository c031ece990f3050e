"""A list of named things, filled by decorators: one list, never two."""

import fnmatch
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from polyformer.core.entry_points import load_installed
from polyformer.core.errors import InputError, quote, unknown

T = TypeVar("T")


def import_modules(package: str) -> None:
    """Import every module of a package and of those inside it, so that what they define is registered.

    A folder of members ends its `__init__` with it: a new member is one file, which no list names.
    """
    for module in pkgutil.walk_packages(sys.modules[package].__path__, f"{package}."):
        importlib.import_module(module.name)


class Members(dict[str, type[T]]):
    """Names to classes. Asked for a name that it lacks, or for all, it first loads installed packages."""

    def __missing__(self, name: str) -> type[T]:
        load_installed()
        if not dict.__contains__(self, name):
            raise KeyError(name)
        return dict.__getitem__(self, name)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):  # a name from a file may be anything
            return False
        if not dict.__contains__(self, name):
            load_installed()
        return dict.__contains__(self, name)

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return super().__iter__()

    def keys(self):
        """All names."""
        load_installed()
        return super().keys()

    def values(self):
        """All classes."""
        load_installed()
        return super().values()

    def items(self):
        """All names with their classes."""
        load_installed()
        return super().items()


def register(registry: dict[str, type[T]], name: str, cls: type[T], what: str) -> None:
    """Enter a class under `name`, which is its own: only the same class, defined again, may take its place.

    Raises `InputError` where another class has the name, which files would else read as the wrong one.
    """
    old = registry.get(name)
    if old is not None and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InputError(
            f"{what} {quote(name)} of {cls.__module__}: the name is taken by "
            f"{old.__module__}.{old.__qualname__}; choose another"
        )
    registry[name] = cls


def in_package(item: object) -> bool:
    """Whether a class or a function is defined in this package, not by a user or by an installed plugin."""
    return getattr(item, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


class Registry(Generic[T]):
    """Names to things of one sort, in the order in which they were registered."""

    def __init__(self, what: str):
        self.what = what
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that enters what it decorates under `name`; a name is taken once."""
        if name in self._items:
            raise InputError(f"{self.what} {quote(name)} is registered already")

        def enter(item: T) -> T:
            self._items[name] = item
            return item

        return enter

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or name not in self._items:  # a name from a file may be anything
            load_installed()
            if not isinstance(name, str) or name not in self._items:
                raise unknown(self.what, name, self._items)
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(self._items)

    def names(self, pattern: str = "*") -> list[str]:
        """The names that match a shell wildcard, sorted."""
        load_installed()
        return sorted(fnmatch.filter(self._items, pattern))
