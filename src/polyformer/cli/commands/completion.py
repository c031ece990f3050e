"""Print a script that completes commands, options, recipes, presets and class names in a shell.

Save it in the folder where your shell looks for completion scripts. Print it again after an update of
polyformer or of your plugins: the script contains the names that exist when it is printed.
"""

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from polyformer.cli.commands import COMMANDS, is_installed, load_command, options_class
from polyformer.cli.commands.options import BARE, argument, choices, flag, metavar, nargs, positional_name

EXAMPLES = """examples:
  polyformer completion bash > ~/.local/share/bash-completion/completions/polyformer
  polyformer completion zsh > DIR/_polyformer      # for a DIR in $fpath
  polyformer completion fish > ~/.config/fish/completions/polyformer.fish
"""

FILES, FOLDERS = {"FILE", "PATH"}, {"DIR", "RUN", "TEACHER", "CHECKPOINT", "OUT"}
"""Metavars of values that are paths."""

AXES = {
    "Block": "--model.block",
    "FeedForward": "--model.feedforward",
    "Head": "--model.head",
    "Mechanism": "--model.attention",
    "Position": "--model.position",
    "Task": "--task.kind",
    "Optimizer": "--optimizer.kind",
    "Schedule": "--schedule.kind",
}
"""Recipe setting that selects a registered class of each kind."""


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """Options of `polyformer completion`."""

    shell: Literal["bash", "zsh", "fish"] = argument("shell that runs the script")


def run(options: CompletionOptions) -> None:
    """Print the completion script."""
    import shtab

    print(shtab.complete(command_line(), options.shell))


def command_line() -> argparse.ArgumentParser:
    """Return a parser of all commands that knows which values are paths, and the choices of the others."""
    result = argparse.ArgumentParser("polyformer")
    result.add_argument("--version", action="store_true", help="print the version")
    subparsers = result.add_subparsers()
    words = value_words()
    settings = recipe_settings(words)
    for name in filter(is_installed, COMMANDS):
        command = load_command(name)
        parser = subparsers.add_parser(name, help=(command.__doc__ or "").splitlines()[0])
        _mark_paths(parser.add_argument("--import", metavar="FILE", help="import your own classes"))
        cls = options_class(command)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if "help" in field.metadata:
                _add(parser, field, hints[field.name], words)
        for field in dataclasses.fields(cls):
            pattern = field.metadata.get("settings", BARE)
            if pattern != BARE:  # settings of a recipe, or only of its model
                for setting, values in settings.items():
                    if re.fullmatch(pattern, setting):
                        parser.add_argument(setting, choices=values or None, help="setting of the recipe")
    return result


def _add(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]", hint: Any, words: Any) -> None:
    options: dict[str, Any] = {"help": field.metadata["help"].replace("%", "%%")}
    if hint is bool:
        parser.add_argument(flag(field), action="store_true", **options)
        return
    options |= {
        "choices": choices(hint) or words.get(positional_name(field)),
        "metavar": metavar(field, hint),
    }
    if number := nargs(field, hint):
        options["nargs"] = number
    _mark_paths(parser.add_argument(field.name if field.metadata["positional"] else flag(field), **options))


def _mark_paths(action: Any) -> None:
    """Complete the values of `action` as paths if its metavar is the name of a path."""
    import shtab

    if action.metavar in FILES:
        action.complete = shtab.FILE
    elif action.metavar in FOLDERS:
        action.complete = shtab.DIRECTORY


def value_words() -> dict[str, list[str]]:
    """Return the choices of values: recipes, presets and claims by metavar, registered classes by kind."""
    from polyformer.cli.documentation import members
    from polyformer.models.presets import MODELS
    from polyformer.training.recipes.recipe import recipe_names

    presets = [*MODELS.names()]
    words = {"RECIPE": recipe_names(), "PRESET": presets, "MODEL": presets}
    if is_installed("reproduce"):
        words["CLAIM"] = load_command("reproduce").claims()
    for axis, name, _ in members():
        words.setdefault(axis, []).append(name)
    return words


def recipe_settings(words: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the settings of the default recipe as --SECTION.NAME, with their choices, if any."""
    from polyformer.training.recipes import Recipe
    from polyformer.training.recipes.recipe import find_recipe

    names = [f"--{name}" for name in dotted_names(Recipe.from_dict(find_recipe("default")).to_dict())]
    settings: dict[str, list[str]] = {name: [] for name in names if "." in name}
    return settings | {setting: words[axis] for axis, setting in AXES.items()}


def dotted_names(values: dict[str, Any]) -> Iterator[str]:
    """Yield the dotted names of all values in nested dicts."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (f"{name}.{rest}" for rest in dotted_names(value))
        else:
            yield name
