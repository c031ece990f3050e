"""The names of models and their parts, of every kind, and the error for an unknown name.

Presets, members and recipes register their names here. An error for a name of another kind explains what the
name is and how it is used.
"""

import difflib
import fnmatch
import importlib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from polyformer.core.errors import QUOTED, InputError, quote, unknown

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
