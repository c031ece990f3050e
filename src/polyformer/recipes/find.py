"""Recipes by name (those in the package) or by file, and where their data lie."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_bounded
from polyformer.core.parsing import YAML_BYTES, parse_yaml
from polyformer.data.library_text import LIBRARY
from polyformer.data.minari_source import PREFIX
from polyformer.data.opening import plain_name
from polyformer.data.prepared.manifest import is_prepared
from polyformer.data.remote import is_remote
from polyformer.recipes.recipe import merged

SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """The recipes in the package."""
    folder = files("polyformer") / "recipes"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(SUFFIXES[0]))


def recipe_text(name: str) -> str:
    """The YAML text of the recipe `name`, or of the file of that name."""
    if name.endswith(SUFFIXES):
        try:
            return read_bounded(name, YAML_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"cannot read {name}: {error}") from error
    if name not in recipe_names():
        raise unknown("recipe", name, recipe_names())
    return (files("polyformer") / "recipes" / f"{name}{SUFFIXES[0]}").read_text(encoding="utf-8")


def find_recipe(name: str, pretrained: bool = False) -> dict[str, Any]:
    """The recipe `name` (in the package, or a .yaml file) as plain data, to change and then check.

    Its part `pretrained` says what is changed for a model that begins with a checkpoint; of `model` only what
    this part says of it remains, the options of the checkpoint's model.
    """
    data = parse_yaml(recipe_text(name), name)
    if not isinstance(data, dict):
        raise InputError(
            f"{name}: expected a recipe, a mapping of task, model, data and so on, got {quote(data)}"
        )
    changes = data.pop("pretrained", {})
    if not isinstance(changes, dict):
        raise InputError(f"{name}: pretrained: expected a mapping of changes, got {quote(changes)}")
    if not pretrained:
        return data
    data.pop("model", None)
    return merged(data, changes)


def with_data(data: dict[str, Any], path: str) -> dict[str, Any]:
    """The `data` part of a recipe, reading from `path`.

    In a directory the files that the recipe names are looked for, gzipped or not; anything else is the
    source to train on, in place of all of them.
    """
    names = named_files(data)
    saved = is_prepared(path) or any(
        (Path(path) / mark).is_file() for mark in ("dataset_dict.json", "state.json")
    )
    if names and Path(path).is_dir() and not saved:
        return {**data, **{role: _in_folder(Path(path), name) for role, name in names.items()}}
    replaced = {*names}
    if names and _suffix(path) != _suffix(names["path"]):
        replaced |= {"format", "header"}  # they describe the recipe's own files
    return {**{key: value for key, value in data.items() if key not in replaced}, "path": path}


def absolute(data: dict[str, Any]) -> dict[str, Any]:
    """The same with every path made independent of the working directory."""
    elsewhere = lambda name: name.startswith(("hub:", PREFIX)) or is_remote(name)  # noqa: E731
    paths = {role: name for role, name in named_files(data).items() if not elsewhere(name)}
    return {**data, **{role: str(Path(name).absolute()) for role, name in paths.items()}}


def named_files(data: dict[str, Any]) -> dict[str, str]:
    """The sources that a recipe names, but not the text that every Python has.

    Raises `InputError` where one is no text, or `data` no mapping.
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
    name = Path(name).name if Path(name).is_absolute() else name  # of a run's recipe
    other = name.removesuffix(".gz") if name.endswith(".gz") else f"{name}.gz"
    for candidate in (name, other):
        if all((folder / name).is_file() for name in _alternatives(candidate)):
            return str(folder / candidate)
    return str(folder / name)  # the reader says what is missing


def _suffix(path: str) -> str:
    return Path(plain_name(path)).suffix


def _alternatives(name: str) -> list[str]:
    """ "a.{b,c}" as "a.b" and "a.c"."""
    head, brace, rest = name.partition("{")
    inside, _, tail = rest.partition("}")
    return [head + choice + tail for choice in inside.split(",")] if brace else [name]
