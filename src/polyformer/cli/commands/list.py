"""List recipes, presets, and the registered classes of every kind: mechanisms, patterns, positions, ...

Prints one line per entry: kind, name, description, source. A word searches names, descriptions and sources.
Select a class by its name, for example with polyformer train --model.position rope --model.attention
"Window(64)".
"""

import fnmatch
from dataclasses import dataclass

from polyformer.cli.commands.options import argument
from polyformer.core.registry import OTHER_NAMES, unknown_name

EXAMPLES = """examples:
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


def run(options: ListOptions) -> None:
    """Print the entries that match."""
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
