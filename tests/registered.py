"""The members that tests run over: of the library and of installed packages, not those that tests define."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pytest

from polyformer.core.registry import in_package, installed_modules

T = TypeVar("T", bound=type)

ONE_EXAMPLE = bool(os.environ.get("ONE_EXAMPLE"))
"""Whether each member is tested with its first example only, as the repetitions of the numeric core do."""

EVERYTHING = bool(os.environ.get("EVERYTHING"))
"""Whether the suite is to run whole, as every night: all examples, half precisions and full products."""

nightly = pytest.mark.skipif(not EVERYTHING, reason="slow: `make test-everything` runs it every night")
"""Marks a test that only the suite of every night runs."""


def examples(member: Any) -> Sequence[Any]:
    """Return the examples of a member that tests run over."""
    return member.examples()[:1] if ONE_EXAMPLE else member.examples()


def registered(registry: Mapping[str, T]) -> list[T]:
    """The classes of a registry that tests have not defined themselves."""
    return [cls for cls in registry.values() if in_package(cls) or _is_installed(cls)]


def _is_installed(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in installed_modules()
