"""Imports at first use: of the public names of a package, and of packages that an extra installs."""

import ast
import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], subpackages: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of `package`.

    `homes` maps a name to its module, relative to `package`, or absolute if it begins with "polyformer.". The
    other names are the `__all__` of `subpackages`. Only the module of a name is loaded, with the first use of
    the name, and none for a misspelt name; so `import polyformer` and the command line stay fast. A type
    checker needs the same names below `if TYPE_CHECKING`; a test compares the two lists.
    """

    @functools.cache
    def all_homes() -> dict[str, str]:
        return {**{name: part for part in subpackages for name in listed_names(f"{package}.{part}")}, **homes}

    def getattr_(name: str) -> Any:
        if name == "__all__":
            return list(all_homes())
        if name.startswith("_") or name not in all_homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = all_homes()[name]
        module = importlib.import_module(home if home.startswith("polyformer.") else f"{package}.{home}")
        return getattr(module, name)

    return getattr_, lambda: sorted(all_homes())


def listed_names(package: str) -> list[str]:
    """Return the `__all__` of a package, read from its source, so that nothing of the package is loaded."""
    spec = importlib.util.find_spec(package)
    source = None if spec is None or spec.loader is None else spec.loader.get_source(package)  # type: ignore[attr-defined]
    if source is None:  # an installation without sources
        return importlib.import_module(package).__all__
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AttributeError(f"module {package!r} has no list __all__")


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
