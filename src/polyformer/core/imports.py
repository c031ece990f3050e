"""Imports at first use: of the public names of a package, and of packages that an extra installs."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@contextlib.contextmanager
def needs_extra(extra: str, reason: str, otherwise: str = "") -> Iterator[None]:
    """Turn an `ImportError` inside into an `InputError` with the way to install the package.

    extra: its name in `pip install 'polyformer[extra]'`. reason: why which package is needed. otherwise:
    another way, such as "or leave it out".
    """
    try:
        yield
    except ImportError as error:
        from polyformer.core.errors import InputError  # `import polyformer` loads this file and nothing else

        way = f", {otherwise}" if otherwise else ""
        raise InputError(f"{reason}; pip install 'polyformer[{extra}]'{way}") from error
