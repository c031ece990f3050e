"""Public names of a package, loaded when they are first used."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], subpackages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`.

    `homes` maps a name to its module, relative to `package`, or absolute if it begins with "polyformer.". The
    other names are the `__all__` of `subpackages`. `import polyformer` and the command line stay fast because
    torch is loaded with the first of these names. A type checker needs the same names below
    `if TYPE_CHECKING`; a test compares the two lists.
    """

    def load(name: str) -> Any:
        return importlib.import_module(name if name.startswith("polyformer.") else f"{package}.{name}")

    def names() -> list[str]:
        return [*homes, *(name for part in subpackages for name in load(part).__all__)]

    def getattr_(name: str) -> Any:
        if name in homes:
            return getattr(load(homes[name]), name)
        if name == "__all__":
            return names()
        if not name.startswith("_"):
            for part in subpackages:
                if name in load(part).__all__:
                    return getattr(load(part), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattr_, lambda: sorted(names())
