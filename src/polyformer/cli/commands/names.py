"""Commands that know all names: list prints those of recipes, presets and classes, completion those that a
shell completes.
"""

import argparse
import dataclasses
import fnmatch
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from polyformer.cli.commands import COMMANDS, is_installed, load_command, load_module, options_class
from polyformer.cli.commands.options import BARE, add_argument, argument, choices, positional_name
from polyformer.core.registry import OTHER_NAMES, unknown_name

LIST_EXAMPLES = """examples:
  polyformer list
  polyformer list sparse        # all entries with this word in their name, description or source
  polyformer list "Child 2019"  # with all of these words
  polyformer list position      # all entries of a kind
  polyformer list "decoder*"    # names by wildcard
"""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of `polyformer list`."""

    pattern: str = argument(
        "a kind, words to search for, or a name in which * and ? match any characters (default: *)", "*"
    )


def run_list(options: ListOptions) -> None:
    """List recipes, presets, and the registered classes of every kind: mechanisms, patterns, positions, ...

    Prints one line per entry: kind, name, description, source. A word searches names, descriptions and
    sources. Select a class by its name, for example with polyformer train --model.position rope
    --model.attention "Window(64)".
    """
    rows = matching(options.pattern)
    if not rows:
        raise unknown_name("name", options.pattern, {name for row in entries() for name in row[:2]})
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for axis, name, description, source in rows:
        print(f"{axis:<{widths[0]}}  {name:<{widths[1]}}  {description}{source and f' [{source}]'}")


def matching(pattern: str) -> list[tuple[str, str, str, str]]:
    """Return the entries of a kind, or with a name or kind that matches a wildcard, or with all words.

    Words are searched in names, descriptions and sources, in upper or lower case, and may be parts of words.
    """
    rows, wanted = entries(), pattern.lower()
    wanted = OTHER_NAMES.get(wanted, wanted)
    if any(character in wanted for character in "*?["):
        return [row for row in rows if any(fnmatch.fnmatchcase(name.lower(), wanted) for name in row[:2])]
    kinds = [row for row in rows if row[0].lower() == wanted]
    return kinds or [row for row in rows if all(word in " ".join(row[1:]).lower() for word in wanted.split())]


ELSEWHERE = [
    (
        "command",
        "data vectors",
        "Word vectors of texts (word2vec): skip-gram or CBOW.",
        "Mikolov et al. 2013",
    ),
    (
        "option",
        "num_key_value_heads",
        "Multi-query (1) and grouped-query attention: fewer heads of keys and values.",
        "Shazeer 2019 (MQA); Ainslie et al. 2023 (GQA)",
    ),
    (
        "option",
        "attention.latent",
        "Multi-head latent attention: keys and values from one latent vector per token.",
        "DeepSeek-AI 2024 (DeepSeek-V2, MLA)",
    ),
    (
        "option",
        "attention.indexer",
        "Sparse attention with an indexer: small heads choose the keys of each query.",
        "DeepSeek-AI 2025 (DeepSeek-V3.2, DSA)",
    ),
]
"""Rows of ideas that are no registered class."""


def entries() -> list[tuple[str, str, str, str]]:
    """Return (kind, name, description, source) of all recipes, presets and registered classes."""
    from polyformer.cli.documentation import members, sentence
    from polyformer.models.presets import MODELS
    from polyformer.training.recipes.recipe import recipe_names, recipe_text

    recipes = [
        ("recipe", name, recipe_text(name).splitlines()[0].lstrip("# "), "") for name in recipe_names()
    ]
    presets = [("preset", name, sentence(MODELS[name]), "") for name in MODELS.names()]
    others = [(axis, name, sentence(member), member.paper) for axis, name, member in members()]
    return [*recipes, *presets, *others, *ELSEWHERE]


COMPLETION_EXAMPLES = """examples:
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


def run_completion(options: CompletionOptions) -> None:
    """Print a script that completes commands, options, recipes, presets and class names in a shell.

    Save it in the folder where your shell looks for completion scripts. Print it again after an update of
    polyformer or of your plugins: the script contains the names that exist when it is printed.
    """
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
        parser = subparsers.add_parser(name, help=command.help.splitlines()[0])
        _mark_paths(parser.add_argument("--import", metavar="FILE", help="import your own classes"))
        cls = options_class(command)
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if "help" in field.metadata:
                known = choices(hints[field.name]) or words.get(positional_name(field))
                _mark_paths(add_argument(parser, field, hints[field.name], known))
        for field in dataclasses.fields(cls):
            pattern = field.metadata.get("settings", BARE)
            if pattern != BARE:  # settings of a recipe, or only of its model
                for setting, values in settings.items():
                    if re.fullmatch(pattern, setting):
                        parser.add_argument(setting, choices=values or None, help="setting of the recipe")
    return result


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
        words["CLAIM"] = load_module("reproduce").claims()
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
