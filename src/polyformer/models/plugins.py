"""Users' own parts: importing their modules, and recording these modules in saved configurations.

A part is registered when the module that defines it is imported. Users name such modules with
`--import mine.py`. Recipes, experiments and saved configurations name them too, so that an error can name a
missing module. No file causes an import of a user's module: somebody else may have provided the file.
"""

import contextlib
import importlib
import importlib.util
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from polyformer.attention.patterns.base import Pattern, parts_in
from polyformer.core.config import Config, decode
from polyformer.core.errors import QUOTED, InputError, quote, shortened

# The modules imported by `import_named`, files by absolute path; worker processes import them too.
IMPORTED_NAMES: dict[str, None] = {}

_OF_THIS_PROJECT = re.compile(r"polyformer(_lab)?(\.[a-z]\w*)+")


class ConfigWithImports(Config):
    """A configuration that is saved with the names of the modules that define its user-defined parts."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with `imports` if there are parts from outside this library."""
        names = modules_of(self)
        return {**super().to_dict(), "imports": list(names)} if names else super().to_dict()

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Return the configuration that `data` describes, without importing anything."""
        if not isinstance(data, dict) or "imports" not in data:
            return super().from_dict(data, where)
        names = decode(tuple[str, ...], data["imports"], "imports")
        with add_missing_imports(names):
            return super().from_dict(
                {name: value for name, value in data.items() if name != "imports"}, where
            )


@contextlib.contextmanager
def add_missing_imports(names: Sequence[str]) -> Iterator[None]:
    """Add to an `InputError` the modules among `names` that are not imported, and how to import them."""
    try:
        yield
    except InputError as error:
        missing = [name for name in names if not is_imported(name)]
        if not missing:
            raise
        every, first = (shortened(text, QUOTED) for text in (", ".join(missing), missing[0]))
        raise InputError(
            f"{error}; it has parts registered by {every}: import that first, or pass --import {first}"
        ) from error


def import_named(name: str) -> None:
    """Import a file `mine.py`, a package's folder, or a module by its dotted name, unless it is imported.

    The folder of a file is added to `sys.path`, as for a script. Raises `InputError` for a missing module, a
    name that another module has, and an error during the import.
    """
    _import_name(name)
    IMPORTED_NAMES[absolute_import(name)] = None


def import_all(names: Sequence[str]) -> None:
    """Import several modules, such as the `IMPORTED_NAMES` of another process."""
    for name in names:
        import_named(name)


def require_imported(names: object, where: str = "imports") -> tuple[str, ...]:
    """Return the modules that a recipe or an experiment names; import those of this project.

    Raises `InputError` for a module that the user has not imported, and if `names` is no list of names.
    """
    modules = decode(tuple[str, ...], names or (), where)
    for name in modules:
        if _OF_THIS_PROJECT.fullmatch(name) and not _is_path(name):
            import_named(name)
        elif not is_imported(name):
            raise InputError(
                f"{where}: {quote(name)} is code, which a file of settings does not run; if you trust it, "
                f"add --import {shlex.quote(shortened(name, QUOTED))} to the command (in Python, import it)"
            )
    return modules


def is_imported(name: str) -> bool:
    """Return whether a module, named by its dotted name or its file, has been imported."""
    stem = Path(name).stem if name.endswith(".py") or "/" in name else name
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return stem in sys.modules or (main is not None and Path(main).stem == stem)


def modules_of(config: Config) -> tuple[str, ...]:
    """Return the modules outside this library that define a part of `config`: `mine.py`, `package.module`."""
    names = {type(part).__module__: None for part in parts_in(config) if isinstance(part, Config | Pattern)}
    return tuple(_import_name_of(module) for module in names if module.partition(".")[0] != "polyformer")


def absolute_import(name: str) -> str:
    """Return the absolute path of a file, or the name of a module unchanged."""
    return str(Path(name).absolute()) if _is_path(name) else name


def _is_path(name: str) -> bool:
    """Return whether a name is that of a file or of a package's folder, not of an installed module."""
    return name.endswith(".py") or Path(name).is_dir()


def _import_name(name: str) -> None:
    path = Path(name)
    if not _is_path(name):
        return _import(name, name)
    file = (path / "__init__.py" if path.is_dir() else path).resolve()
    if not file.is_file():
        raise InputError(f"--import {name}: no such file" + (" (__init__.py)" if path.is_dir() else ""))
    folder = file.parent.parent if path.is_dir() else file.parent
    module = path.resolve().stem
    if not module.isidentifier():
        raise InputError(f"--import {name}: {quote(module)} is not a valid module name; rename the file")
    if str(folder) not in sys.path:
        # Appended: a user's file must not hide an installed package.
        sys.path.append(str(folder))
    importlib.invalidate_caches()  # the file may be newer than the cached directory listing
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        other = spec.origin if spec and spec.origin else "another module"
        raise InputError(f"--import {name}: the name {quote(module)} is taken by {other}; rename the file")
    return _import(module, name)


def _import(module: str, name: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise InputError(
                f"--import {name}: it needs {quote(error.name)}, which is not installed"
            ) from error
        raise InputError(f"--import {name}: no such module; name a file as mine.py, or install it") from error
    except Exception as error:  # a user's code may raise anything
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{line.filename}, line {line.lineno}"
        raise InputError(f"--import {name}: {type(error).__name__}: {error} ({where})") from error


def _import_name_of(module: str) -> str:
    """Return the name by which a user imports a module: its file if it is not in a package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).name if file and "." not in module and Path(file).name != "__init__.py" else module
