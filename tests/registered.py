"""The members that tests run over: of the library and of installed packages, not those that tests define."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pytest

from polyformer.core.registry import in_package, installed_modules

T = TypeVar("T", bound=type)

EVERYTHING = bool(os.environ.get("EVERYTHING"))
"""Whether the suite is whole, as at night: all examples, half precisions and full products."""

nightly = pytest.mark.nightly
"""Marks a test that runs at night only; `nights.py` names others."""


def examples(member: Any) -> Sequence[Any]:
    """Return the examples of a member that tests run over: by day the first, which shows its equation."""
    return member.examples() if EVERYTHING else member.examples()[:1]


def registered(registry: Mapping[str, T]) -> list[T]:
    """The classes of a registry that tests have not defined themselves."""
    return [cls for cls in registry.values() if in_package(cls) or _is_installed(cls)]


def _is_installed(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in installed_modules()
