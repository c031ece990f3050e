"""Recipes by name (in the package) or by file, and the paths of their data."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_bounded
from polyformer.core.limits import YAML_BYTES
from polyformer.core.names import register_names, unknown_name
from polyformer.core.parsing import parse_yaml
from polyformer.data.compressed_files import plain_name
from polyformer.data.library_text import LIBRARY
from polyformer.data.minari_source import PREFIX
from polyformer.data.origins import is_source
from polyformer.data.prepared.manifest import is_prepared
from polyformer.data.remote import is_remote
from polyformer.training.recipes.recipe import merged

SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """Return the names of the recipes in the package."""
    folder = files("polyformer.training.recipes")
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(SUFFIXES[0]))


register_names("recipe", lambda: dict.fromkeys(recipe_names(), ""), "polyformer train {name}")


def recipe_text(name: str) -> str:
    """Return the YAML text of the recipe `name`, or of the file of this name."""
    if name.endswith(SUFFIXES):
        try:
            return read_bounded(name, YAML_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"cannot read {name}: {error}") from error
    if name not in recipe_names():
        raise unknown_name("recipe", name, recipe_names())
    return (files("polyformer.training.recipes") / f"{name}{SUFFIXES[0]}").read_text(encoding="utf-8")


def find_recipe(name: str, pretrained: bool = False) -> dict[str, Any]:
    """Return the recipe `name` (in the package, or a .yaml file) as plain data, not yet checked.

    The entry `pretrained` of a recipe contains changes for a model that starts from a checkpoint. In this
    case the entry `model` is replaced by the options of `pretrained` for the model of the checkpoint.
    """
    data = _complete(name)
    changes = data.pop("pretrained", {})
    if not isinstance(changes, dict):
        raise InputError(f"{name}: pretrained: expected a mapping of changes, got {quote(changes)}")
    if not pretrained:
        return data
    data.pop("model", None)
    return merged(data, changes)


def _complete(name: str) -> dict[str, Any]:
    """Return the recipe `name` on top of the recipe of the package that its entry `extends` names, if any."""
    data = parse_yaml(recipe_text(name), name)
    if not isinstance(data, dict):
        raise InputError(
            f"{name}: expected a recipe, a mapping of task, model, data and so on, got {quote(data)}"
        )
    base = data.pop("extends", None)
    if base is None:
        return data
    if not isinstance(base, str) or base not in recipe_names():
        raise InputError(f"{name}: extends: {unknown_name('recipe', base, recipe_names())}")
    return merged(_complete(base), data)


def with_data(data: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the `data` part of a recipe, reading from `path`.

    In a directory, the files named by the recipe are looked up, gzipped or not. Anything else, such as a
    directory with a folder per label, replaces all of them as the source of training data.
    """
    names, folder = named_files(data), Path(path)
    if names and folder.is_dir() and not is_prepared(path):
        inside = {role: _in_folder(folder, name) for role, name in names.items()}
        if all(map(_is_there, inside.values())) or not is_source(folder):
            return {**data, **inside}
    replaced = {*names}
    if names and _suffix(path) != _suffix(names["path"]):
        replaced |= {"format", "header"}  # they describe the original files of the recipe
    return {**{key: value for key, value in data.items() if key not in replaced}, "path": path}


def absolute(data: dict[str, Any]) -> dict[str, Any]:
    """Return the same data options with absolute paths."""
    elsewhere = lambda name: name.startswith(("hub:", PREFIX)) or is_remote(name)  # noqa: E731
    paths = {role: name for role, name in named_files(data).items() if not elsewhere(name)}
    return {**data, **{role: str(Path(name).absolute()) for role, name in paths.items()}}


def named_files(data: dict[str, Any]) -> dict[str, str]:
    """Return the sources that a recipe names, except the text included with Python.

    Raises `InputError` for a source that is not a string, or `data` that is not a mapping.
    """
    if not isinstance(data, dict):
        raise InputError(f"data: expected a mapping with a path, got {quote(data)}")
    names = {role: data[role] for role in ("path", "validation", "test") if data.get(role)}
    for role, name in names.items():
        if not isinstance(name, str):
            raise InputError(
                f"data.{role}: expected one source, got {quote(name)}; for several files a pattern, 'a/*.txt'"
            )
    return {role: name for role, name in names.items() if name != LIBRARY}


def _in_folder(folder: Path, name: str) -> str:
    name = Path(name).name if Path(name).is_absolute() else name  # from the recipe of a run
    other = name.removesuffix(".gz") if name.endswith(".gz") else f"{name}.gz"
    for candidate in (name, other):
        if _is_there(str(folder / candidate)):
            return str(folder / candidate)
    return str(folder / name)  # the reader raises an error for the missing file


def _suffix(path: str) -> str:
    return Path(plain_name(path)).suffix


def _is_there(name: str) -> bool:
    """Return whether the file exists, or both of two parallel files."""
    return all(Path(file).is_file() for file in _alternatives(name))


def _alternatives(name: str) -> list[str]:
    """Expand "a.{b,c}" to "a.b" and "a.c"."""
    head, brace, rest = name.partition("{")
    inside, _, tail = rest.partition("}")
    return [head + choice + tail for choice in inside.split(",")] if brace else [name]
