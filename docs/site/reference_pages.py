"""Generate the reference: public names with types, commands with options, and recipes."""

import argparse
import importlib
import inspect
from types import ModuleType
from typing import Any

from docstrings import markdown

import polyformer
from polyformer.attention.patterns.base import Pattern
from polyformer.cli.commands import COMMANDS, load_command
from polyformer.cli.commands.options import parser
from polyformer.core.config import Config
from polyformer.training.recipes.recipe import recipe_names, recipe_text

PACKAGES = (
    "attention.patterns",
    "attention.mechanisms",
    "attention.positions",
    "nn.memory",
    "nn.depth",
    "nn.feedforward",
    "nn.block",
    "nn.heads",
    "nn.stack",
    "models.architectures",
    "models.generation",
    "models.checkpoints",
    "models.transformers",
    "data",
    "training.tasks",
    "training",
    "training.recipes",
    "applications.probing",
    "applications.prompting",
    "applications.exits",
    "applications.retrieval",
)
"""Subpackages with a public `__all__`, from attention to training."""


def pages() -> dict[str, str]:
    """Return the pages of the reference by path."""
    result = {"reference/cli.md": command_page(), "reference/recipes.md": recipe_page()}
    seen: dict[Any, str] = {}
    result["reference/api/polyformer.md"] = package_page(polyformer, _own_names(), seen)
    for name in PACKAGES:
        package = importlib.import_module(f"polyformer.{name}")
        result[f"reference/api/{name}.md"] = package_page(package, list(package.__all__), seen)
    listed = "\n".join(f"api/{name}" for name in ("polyformer", *PACKAGES))
    result["reference/api.md"] = API.format(contents=listed)
    return result


API = """# API

Public names with their types and docstrings. Most programs only need [polyformer](api/polyformer.md). The
subpackages contain the configuration of every part, and the base classes for your own parts.

```{{toctree}}
:titlesonly:

{contents}
```
"""


def _own_names() -> list[str]:
    """Return the names of `polyformer` without its patterns, which have a separate page."""
    patterns = importlib.import_module("polyformer.attention.patterns").__all__
    return [name for name in polyformer.__all__ if name not in patterns]


def package_page(package: ModuleType, names: list[str], seen: dict[Any, str]) -> str:
    """Return the page of a package. Names with an entry on another page are only listed."""
    home = package.__name__
    elsewhere, directives = [], []
    for name in sorted(names, key=str.lower):
        thing = getattr(package, name)
        if isinstance(thing, type) or callable(thing):
            if thing in seen:
                elsewhere.append(f"`{name}` ([{seen[thing]}]({seen[thing].removeprefix('polyformer.')}.md))")
                continue
            seen[thing] = home
        directives.append(directive(f"{home}.{name}", thing))
    also = f"\n\nAlso here: {', '.join(elsewhere)}." if elsewhere else ""
    doc = markdown(inspect.cleandoc(package.__doc__ or ""))
    return f"# {home}\n\n{doc}{also}\n\n```{{eval-rst}}\n{chr(10).join(directives)}\n```\n"


def directive(name: str, thing: Any) -> str:
    """Return the autodoc directive of a name; signatures show the members of configurations and patterns."""
    if not isinstance(thing, type):
        return f".. auto{'function' if callable(thing) else 'data'}:: {name}\n"
    plain = issubclass(thing, Config | Pattern) and thing not in (Config, Pattern)
    plain = plain or issubclass(thing, tuple | BaseException)
    return f".. autoclass:: {name}\n" + ("" if plain else "   :members:\n")


def command_page() -> str:
    """Return the page of all commands with their options and examples."""
    intro = "Generated from the parsers: `polyformer COMMAND --help` prints the same."
    parts = [f"# Commands\n\n{intro} [The command line](../cli.md) shows how they work together."]
    for name in COMMANDS:
        command = load_command(name)
        usage_parser = parser(name, command, [])
        parts.append(f"## polyformer {name}\n\n{markdown(command.help)}")
        usage = usage_parser.format_usage().removeprefix("usage: ").strip()
        parts.append(f"```text\n{usage}\n```")
        parts.append("\n".join(["| option | |", "|---|---|", *option_rows(usage_parser)]))
        examples = [line.strip() for line in command.examples.splitlines()[1:] if line.strip()]
        if examples:
            parts.append("```sh\n" + "\n".join(examples) + "\n```")
    return "\n\n".join(parts) + "\n"


def option_rows(command: argparse.ArgumentParser) -> list[str]:
    """Return a table row for each option of a parser and for each group of settings."""
    formatter = command._get_formatter()
    rows = []
    for action in command._actions:
        if action.help is argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        words = formatter._format_action_invocation(action).replace("|", "\\|")
        text = markdown(" ".join((action.help or "").split())).replace("|", "\\|").replace("%%", "%")
        rows.append(f"| `{words}` | {text} |")
    for group in command._action_groups:
        if group.description and not group._group_actions:
            words, _, text = group.description.partition("  ")
            rows.append(f"| `{words.strip()}` | {markdown(text.strip())} |".replace("%%", "%"))
    return rows


def recipe_page() -> str:
    """Return the page of all recipes in the package, as YAML."""
    intro = "A recipe describes a training, from data to a finished run. The command line can set any value."
    parts = [f"# Recipes\n\n{intro}\n\n`polyformer train NAME --print` prints a recipe with all values."]
    for name in recipe_names():
        parts.append(f"## {name}\n\n```yaml\n{recipe_text(name).strip()}\n```")
    return "\n\n".join(parts) + "\n"
