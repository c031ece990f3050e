"""Registries of named objects, and the names of models and their parts, of every kind.

Registries are filled by decorators and by installed packages. An installed package names its members by an
entry point of the group `polyformer.members`:

    [project.entry-points."polyformer.members"]
    my-package = "my_package.members"

The module is imported when a registry looks up a name that it does not have, or lists all names; never by
`import polyformer`.

Presets, members and recipes register their names here, too. An error for a name of another kind explains what
the name is and how it is used.
"""

import difflib
import fnmatch
import functools
import importlib
import pkgutil
import re
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from polyformer.core.errors import QUOTED, InputError, caution, quote, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

MODULES = (
    "polyformer.models.architectures",
    "polyformer.models.presets",
    "polyformer.training.tasks",
    "polyformer.training.recipes.recipe",
)
"""Modules whose import registers every kind."""


OTHER_NAMES = {
    "decision-transformer": "dt-*",
    "mixture-of-experts": "experts",
    "moe": "experts",
    "transformer-d": "decoder-*",
    "transformer-dmca": "t-dmca-*",
    "transformer-ed": "transformer-*",
}
"""Names in papers, with our names for the same as a wildcard."""


class Kind(NamedTuple):
    """The names of one kind, each with its source ("" for none), and how to use a name."""

    names: Callable[[], dict[str, str]]
    use: str


class Name(NamedTuple):
    """A name with its kind, source and use."""

    name: str
    kind: str
    source: str
    use: str


_kinds: dict[str, Kind] = {}


def register_names(kind: str, names: Callable[[], dict[str, str]], use: str) -> None:
    """Register the names of a kind; `use` shows how to use a name, with `{name}` as its placeholder."""
    _kinds[kind] = Kind(names, use)


def registered_names() -> list[Name]:
    """Return all names of all kinds."""
    for module in MODULES:
        importlib.import_module(module)
    return [
        Name(name, kind, source, use.format(name=name))
        for kind, (names, use) in _kinds.items()
        for name, source in names().items()
    ]


def unknown_name(kind: str, value: object, known: Iterable[str]) -> InputError:
    """Return an error for `value`, no name of `kind`, with suggestions from the names of all kinds.

    The error explains a name of another kind, and names a member with `value` in its source, as "(RoFormer)".
    """
    own = sorted(known)
    if not isinstance(value, str):
        return unknown(kind, value, own)
    value, wanted = value[:QUOTED], _plain(value[:QUOTED])
    others = [name for name in registered_names() if name.kind != kind]
    longer = [name for name in own if _plain(name).startswith(f"{wanted}-")][:3]
    longer = longer or fnmatch.filter(own, OTHER_NAMES.get(wanted, ""))[:3]
    same = [f"{_with_article(name)} ({name.use})" for name in others if _plain(name.name) == wanted]
    hints = [f"it is {' and '.join(same)}"] if same else []
    if not hints and not longer:
        cited = [name for name in others if wanted in map(_plain, re.findall(r"\(([^)]*)\)", name.source))]
        hints = [
            f"it is the source of {quote(name.name)}, {_with_article(name)} ({name.use})"
            for name in cited[:2]
        ]
    if longer:
        hints.append(f"did you mean {' or '.join(map(quote, longer))}?")
    if not hints:
        return _nearest_names(kind, value, own, others)
    return InputError(f"unknown {kind} {quote(value)}: {'; '.join(hints)}")


def _nearest_names(kind: str, value: str, own: list[str], others: list[Name]) -> InputError:
    """Return the error with the nearest names of all kinds; among equals, names of `kind` come first."""
    uses = {name.name: f"{quote(name.name)} ({_with_article(name)}: {name.use})" for name in others}
    uses |= {name: quote(name) for name in own}
    near = difflib.get_close_matches(value, sorted(uses), n=3, cutoff=0.5)
    if not near:
        return unknown(kind, value, own)
    return InputError(
        f"unknown {kind} {quote(value)}: did you mean {' or '.join(uses[name] for name in near)}?"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _with_article(name: Name) -> str:
    return f"{'an' if name.kind[0] in 'aeiou' else 'a'} {name.kind}"


T = TypeVar("T")

GROUP = "polyformer.members"

_lock = threading.RLock()
_started = False


def load_installed() -> None:
    """Import the installed members, once; a package that fails is named in a warning and left out."""
    global _started
    with _lock:  # other threads wait; an imported module may look up members too
        if _started:
            return
        _started = True
        for point in _entry_points():
            try:
                point.load()
            except Exception as error:  # code of other packages may raise anything
                package = point.dist.name if point.dist else point.name
                caution(
                    f"the members of the installed package {package} are left out: importing {point.value} "
                    f"failed with {type(error).__name__}: {error}"
                )


def installed_modules() -> frozenset[str]:
    """Return the top-level modules of installed packages that define members."""
    return frozenset(point.value.partition(":")[0].partition(".")[0] for point in _entry_points())


@functools.cache
def _entry_points() -> "tuple[EntryPoint, ...]":
    from importlib.metadata import entry_points  # loads the parsers of mails and archives

    return tuple(entry_points(group=GROUP))


def import_modules(package: str) -> None:
    """Import every module of a package and of its subpackages, so that their definitions are registered.

    A package of members calls this at the end of its `__init__`: a new member is a single file, without any
    list to extend.
    """
    for module in pkgutil.walk_packages(sys.modules[package].__path__, f"{package}."):
        importlib.import_module(module.name)


class Members(UserDict[str, type[T]]):
    """Names to classes. A look-up of a missing name, or of all names, first loads installed packages."""

    def __missing__(self, name: str) -> type[T]:
        if name not in self:
            raise KeyError(name)
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):  # a name from a file may have any type
            return False
        if name not in self.data:
            load_installed()
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(self.data)


def register(registry: Members[T], name: str, cls: type[T], what: str) -> None:
    """Register a class under `name`; only the same class, defined again, may replace it.

    Raises `InputError` if another class has the name, as files would otherwise be read as the wrong class.
    """
    old = registry.data.get(name)
    if old is not None and (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InputError(
            f"{what} {quote(name)} of {cls.__module__}: the name is taken by "
            f"{old.__module__}.{old.__qualname__}; choose another"
        )
    registry[name] = cls


def in_package(item: object) -> bool:
    """Return whether a class or function is defined in this package, not by a user or an installed plugin."""
    return getattr(item, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


class Registry(Generic[T]):
    """Names to objects of one kind, in the order of registration."""

    def __init__(self, what: str):
        self.what = what
        self._items: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its argument under `name`; a name can be used once."""
        if name in self._items:
            raise InputError(f"{self.what} {quote(name)} is registered already")

        def enter(item: T) -> T:
            self._items[name] = item
            return item

        return enter

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or name not in self._items:  # a name from a file may have any type
            load_installed()
            if not isinstance(name, str) or name not in self._items:
                raise unknown_name(self.what, name, self._items)
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(self._items)

    def names(self, pattern: str = "*") -> list[str]:
        """Return the names that match a shell wildcard, sorted."""
        load_installed()
        return sorted(fnmatch.filter(self._items, pattern))
