"""List recipes, presets, and the registered classes of every kind: mechanisms, patterns, positions, ...

Prints one line per entry: kind, name, description, source. Select a class by its name, for example with
polyformer train --model.position rope --model.attention "Window(64)".
"""

import fnmatch
from dataclasses import dataclass

from polyformer.cli.commands.options import argument
from polyformer.core.names import unknown_name

EXAMPLES = """examples:
  polyformer list
  polyformer list "decoder*"
  polyformer list position      # all entries of a kind
"""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of `polyformer list`."""

    pattern: str = argument("name or kind; * and ? match any characters (default: *)", "*")


def run(options: ListOptions) -> None:
    """Print the entries with a matching name or kind."""
    rows = [
        row
        for row in entries()
        if any(fnmatch.fnmatchcase(name.lower(), options.pattern.lower()) for name in row[:2])
    ]
    if not rows:
        raise unknown_name("name", options.pattern, {name for row in entries() for name in row[:2]})
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    for axis, name, *rest in rows:
        print(f"{axis:<{widths[0]}}  {name:<{widths[1]}}  {'; '.join(text for text in rest if text)}")


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
    return [*recipes, *presets, *others]
