"""Generate the tables and pictures of the docs: `python -m polyformer.cli.documentation [--check]`."""

import argparse
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from polyformer.attention.patterns.base import Pattern
from polyformer.core.config import Config
from polyformer.core.ranges import limit_table
from polyformer.core.registry import in_package
from polyformer.models.presets import MODELS, create_model
from polyformer.training.recipes.sizes import size_table

ROOT = Path(__file__).parents[3]
README, SECURITY = "README.md", "SECURITY.md"
DOCS = ROOT / "docs"
PICTURES = "patterns", "positions"

FAMILIES = ("models.architectures", "training.tasks", "training.recipes")
"""Packages that register all configurations when they are imported."""


class Member(NamedTuple):
    """A registered class with its axis (the kind of part) and its name."""

    axis: str
    name: str
    cls: type[Config] | type[Pattern]


def members() -> Iterator[Member]:
    """Yield all registered classes, including those of users."""
    for package in FAMILIES:
        importlib.import_module(f"polyformer.{package}")
    for family in sorted(Config.__subclasses__(), key=lambda config: config.__name__):
        for kind, member in sorted(family.kinds.items()):
            yield Member(family.__name__.removesuffix("Config"), kind, member)
    for name, pattern in sorted(Pattern.registry.items()):
        yield Member("Pattern", name, pattern)


def sentence(thing: object) -> str:
    """Return the first paragraph of a docstring as one line."""
    text = " ".join((thing.__doc__ or "").split("\n\n")[0].split())
    return text if text.endswith(".") or not text else text + "."


def member_table() -> str:
    """Return the registered classes of this package as a Markdown table."""
    lines = ["| axis | name | what | source |", "|---|---|---|---|"]
    lines += [
        f"| {axis} | {_linked(axis, name)} | {_cell(sentence(member))} | {member.paper} |"
        for axis, name, member in members()
        if in_package(member)
    ]
    return "\n".join(lines)


def _linked(axis: str, name: str) -> str:
    """Return a name, with a link to its page in docs/members if there is one."""
    page = f"members/{axis.lower()}/{name}.md"
    return f"[`{name}`]({page})" if (DOCS / page).is_file() else f"`{name}`"


def preset_table() -> str:
    """Return the presets with their exact parameter counts and their recipes as a Markdown table."""
    from polyformer.training.recipes import Recipe, find_recipe, recipe_names

    recipes: dict[str, list[str]] = {}
    for recipe in recipe_names():
        preset = Recipe.from_dict(find_recipe(recipe)).model.preset
        recipes.setdefault(preset or "", []).append(f"`{recipe}`")
    lines = ["| preset | parameters | what | recipes |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {parameters(name):,} | {_cell(sentence(MODELS[name]))} | "
        f"{', '.join(recipes.get(name, []))} |"
        for name in MODELS.names()
    ]
    return "\n".join(lines)


def parameters(preset: str) -> int:
    """Return the number of parameters of a preset, built on the meta device."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create_model(preset).parameters())


def family_table() -> str:
    """Return the supported families of public checkpoints as a Markdown table."""
    from polyformer.models.checkpoints import FAMILIES

    lines = [
        "| model_type | source | objective | classes | sizes (parameters) | required options |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(FAMILIES):
        family = FAMILIES[name]
        classes = ", ".join(f"`{family.class_prefix}{task}`" for task in family.tasks)
        sizes = ", ".join(f"`{size}` ({parameters(size):,})" for size in family.sizes)
        required = ", ".join(f"`{option}={value!r}`" for option, value in family.required.items())
        lines.append(f"| `{name}` | {family.paper} | {family.objective} | {classes} | {sizes} | {required} |")
    return "\n".join(lines)


def reach_table() -> str:
    """Return what each family of public checkpoints is, and by which other ways it is read."""
    from polyformer.models.checkpoints import FAMILIES
    from polyformer.models.checkpoints.gguf import ARCHITECTURES

    lines = ["| model_type | what | by `attach` | GGUF | differs | heads |", "|---|---|---|---|---|---|"]
    differing = _differing()
    for name in sorted(FAMILIES):
        family = FAMILIES[name]
        heads = ", ".join(dict.fromkeys(f"`{task.head.kind}`" for task in family.tasks.values()))
        ways = f"{_attached(family.class_prefix)} | {'yes' if name in ARCHITECTURES else ''}"
        ways += f" | {'[yes](#where-ours-differs)' if _plain(name) in differing else ''}"
        lines.append(f"| `{name}` | {_cell(sentence(family))} | {ways} | {heads} |")
    return "\n".join(lines)


def refused_table() -> str:
    """Return the model types of transformers that are refused, with what they would need."""
    from polyformer.models.checkpoints.load import REFUSED

    lines = ["| model_type | by `attach` | missing |", "|---|---|---|"]
    lines += [f"| `{name}` | {_attached(name)} | {missing} |" for name, missing in sorted(REFUSED.items())]
    return "\n".join(lines)


def other_types() -> str | None:
    """Return the other model types of transformers; None unless the tested version is installed."""
    from polyformer.models.checkpoints import FAMILIES
    from polyformer.models.checkpoints.load import REFUSED

    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None
    if f"transformers {installed}" != verified():
        return None
    mapping = importlib.import_module("transformers.models.auto.configuration_auto")
    names = sorted({*mapping.CONFIG_MAPPING_NAMES} - {*FAMILIES} - {*REFUSED})
    attached = [name for name in names if _attached(name)]
    others = [name for name in names if not _attached(name)]
    lists = (", ".join(f"`{name}`" for name in some) for some in (attached, others))
    return "By `attach`: {}.\n\nNeither way: {}.".format(*lists)


def _differing() -> set[str]:
    """Return the `_plain` names of the families with an entry of "Where ours differs" in docs/models.md."""
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    entries = page.partition("## Where ours differs")[2].partition("\n## ")[0]
    heads = re.findall(r"^- ([^:]+):", entries, re.MULTILINE)
    return {_plain(name) for head in heads for name in head.split(",")}


def _plain(name: str) -> str:
    """Return the name of a family, its model type or its classes without case, signs and "text"."""
    return re.sub(r"[^a-z0-9]", "", name.strip().removesuffix("_text").lower())


def _attached(name: str) -> str:
    """Return "yes" if the architecture is tested with our attention; the name of a type or of its classes."""
    from polyformer.models.attached.architectures import ARCHITECTURES

    return "yes" if any(row.name.lower() == _plain(name) for row in ARCHITECTURES) else ""


def architecture_table() -> str:
    """Return the architectures of transformers that are tested with polyformer's attention."""
    from polyformer.models.attached.architectures import ARCHITECTURES

    lines = ["| architecture | class | kind | sliding windows | beyond a mask |", "|---|---|---|---|---|"]
    for row in sorted(ARCHITECTURES, key=lambda row: (row.kind, row.name)):
        windows = "yes" if row.window is not None else ""
        lines.append(f"| {row.name} | `{row.model}` | {row.kind} | {windows} | {row.features} |")
    return "\n".join(lines)


def verified() -> str:
    """Return the version of transformers that the families are tested against."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return next(f"transformers {pin.partition('==')[2]}" for pin in pins if pin.startswith("transformers=="))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES: dict[str, Callable[[], str | None]] = {
    "members": member_table,
    "presets": preset_table,
    "families": family_table,
    "reach": reach_table,
    "refused": refused_table,
    "other-types": other_types,
    "architectures": architecture_table,
    "limits": limit_table,
    "sizes": size_table,
    "verified": verified,
}


def generated(text: str) -> str:
    """Return `text` with the content between `<!-- NAME -->` and `<!-- /NAME -->` regenerated.

    It stays as it is where this machine lacks what it is made of.
    """
    for name, make in TABLES.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if start in text and end in text and (content := make()) is not None:
            head, rest = text.split(start, 1)
            text = f"{head}{start}\n{content}\n{end}{rest.split(end, 1)[1]}"
    return text


def files() -> dict[Path, str]:
    """Return the expected content of every file with generated parts."""
    from polyformer.cli.plots.svg import pages

    complete = {DOCS / name: text for name, text in pages().items()}
    partial = [
        path for path in [ROOT / README, ROOT / SECURITY, *sorted(DOCS.glob("*.md"))] if path not in complete
    ]
    return {path: generated(path.read_text(encoding="utf-8")) for path in partial} | complete


def main(arguments: list[str] | None = None) -> int:
    """Write the generated parts; with `--check` only list stale files, with exit status 1."""
    check = has_check_option(arguments, __doc__ or "")
    wanted = files()
    stale = update(wanted, check)
    gone = [
        path for folder in PICTURES for path in sorted((DOCS / folder).glob("*.svg")) if path not in wanted
    ]
    for path in gone:
        print(f"{path.relative_to(ROOT)}: {'no longer used; run `make docs`' if check else 'removed'}")
        if not check:
            path.unlink()
    return 1 if check and (stale or gone) else 0


def has_check_option(arguments: list[str] | None, description: str) -> bool:
    """Return whether the command line has `--check`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="list stale files and write nothing")
    return parser.parse_args(arguments).check


def update(wanted: dict[Path, str], check: bool) -> list[Path]:
    """Write the files with another content, or with `check` only list them; return their paths."""
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'stale; run `make docs`' if check else 'written'}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
