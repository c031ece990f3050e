"""A user's own parts: which files to import for them, said by the user, and where saved parts came from.

A part is registered when the module that defines it is imported. Users name such modules, by
`--import mine.py` or `imports:` in a recipe that they train; what is saved names them too, so that an error
can say what is missing. Nothing is ever imported because a checkpoint or a run's folder says so.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from polyformer.attention.patterns.base import Pattern
from polyformer.core.config import Config, decode
from polyformer.core.errors import InputError, quote, shortened
from polyformer.core.limits import QUOTED

NAMED: dict[str, None] = {}
"""What `import_named` has imported, files by their whole path: processes that are started import it too."""


class Saved(Config):
    """A configuration that is saved with the names of the modules that a user's own parts come from."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `imports` where there are parts that are not of this library."""
        names = modules_of(self)
        return {**super().to_dict(), "imports": list(names)} if names else super().to_dict()

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """The configuration that `data` describes; imports nothing."""
        if not isinstance(data, dict) or "imports" not in data:
            return super().from_dict(data, where)
        names = decode(tuple[str, ...], data["imports"], "imports")
        with telling(names):
            return super().from_dict(
                {name: value for name, value in data.items() if name != "imports"}, where
            )


@contextlib.contextmanager
def telling(names: Sequence[str]) -> Iterator[None]:
    """Adds to an `InputError` which of the modules `names` are not imported yet, and how to."""
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
    """Import a file `mine.py`, a package's folder, or a module by its dotted name; once is enough.

    The folder of a file joins `sys.path`, as a script's does. Raises `InputError` for what is not there, for
    a name that another module has, and for what fails while it is imported.
    """
    _named(name)
    NAMED[absolute(name)] = None


def import_all(names: Sequence[str]) -> None:
    """Import several: what another process had `NAMED`."""
    for name in names:
        import_named(name)


def is_imported(name: str) -> bool:
    """Whether a module, by its dotted name or its file's, has been imported."""
    stem = Path(name).stem if name.endswith(".py") or "/" in name else name
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return stem in sys.modules or (main is not None and Path(main).stem == stem)


def modules_of(config: Config) -> tuple[str, ...]:
    """The modules, other than this library's, that define a part of `config`: `mine.py`, `package.module`."""
    names = {type(part).__module__: None for part in _parts(config)}
    return tuple(_name(module) for module in names if module.partition(".")[0] != "polyformer")


def absolute(name: str) -> str:
    """A file's name made independent of the working directory; a module's as it is."""
    return str(Path(name).absolute()) if name.endswith(".py") or Path(name).is_dir() else name


def _named(name: str) -> None:
    path = Path(name)
    if not (name.endswith(".py") or path.is_dir()):
        return _import(name, name)
    file = (path / "__init__.py" if path.is_dir() else path).resolve()
    if not file.is_file():
        raise InputError(f"--import {name}: no such file" + (" (__init__.py)" if path.is_dir() else ""))
    folder = file.parent.parent if path.is_dir() else file.parent
    module = path.resolve().stem
    if not module.isidentifier():
        raise InputError(
            f"--import {name}: {quote(module)} is no name that Python can import; rename the file"
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()  # the file may have been written since the last look
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
    except Exception as error:  # whatever a user's code raises
        line = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{line.filename}, line {line.lineno}"
        raise InputError(f"--import {name}: {type(error).__name__}: {error} ({where})") from error


def _name(module: str) -> str:
    """How a user names a module: a file beside no package by its file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).name if file and "." not in module and Path(file).name != "__init__.py" else module


def _parts(value: Any) -> Iterator[Config | Pattern]:
    if isinstance(value, tuple):
        for item in value:
            yield from _parts(item)
    elif isinstance(value, Config | Pattern):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
