"""Generate a page for each member from its file in docs/members and from the code.

docs/members/AXIS/NAME.md contains the title, the equation, and when to use the member. A member without this
file, such as a member of an installed package, gets a page from its docstring. Facts, picture, code and
options are generated.
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import get_args

from docstrings import blocks, markdown
from snippets import expression, python, shell

from polyformer.attention.patterns.base import Pattern
from polyformer.cli.documentation import Member, members
from polyformer.cli.plots.svg import described
from polyformer.core.config import Config, type_hints
from polyformer.core.ranges import ranges
from polyformer.core.registry import in_package

DOCS = Path(__file__).parents[1]

TITLES = {
    "Mechanism": "Mechanisms",
    "Pattern": "Patterns",
    "Position": "Positions",
    "RopeExtension": "Extensions of RoPE",
    "Memory": "Memories",
    "CachePolicy": "Policies of KV caches",
    "Depth": "Depth",
    "ExitRule": "Rules of exits",
    "FeedForward": "Feed-forwards",
    "Block": "Blocks",
    "Norm": "Norms",
    "Head": "Heads",
    "Drafting": "Drafts by the model itself",
    "Task": "Tasks",
    "Optimizer": "Optimizers",
    "Schedule": "Schedules",
    "Trunk": "Trunks of policies",
}
"""The axes in the order of the table of contents; other axes follow."""


def path(axis: str, name: str) -> str:
    """Return the path of a member's page under `docs`, in the site and in the repository."""
    return f"members/{axis.lower()}/{name}.md"


def pages() -> dict[str, str]:
    """Return the pages of all members and of all axes."""
    everything = list(members())
    result = {path(member.axis, member.name): page(member) for member in everything}
    axes = [*TITLES, *sorted({member.axis for member in everything} - {*TITLES})]
    for axis in axes:
        mine = [member for member in everything if member.axis == axis]
        result[f"members/{axis.lower()}/index.md"] = axis_page(axis, mine)
    return result


def axis_page(axis: str, mine: list[Member]) -> str:
    """Return the page of an axis: its members with their sources, and a table of contents."""
    rows = [
        f"| [{title(member)}]({member.name}.md) | `{member.name}` | {member.cls.paper} |" for member in mine
    ]
    contents = "\n".join(member.name for member in mine)
    return "\n".join(
        [
            f"# {TITLES.get(axis, axis)}",
            "",
            "| member | written as | source |",
            "|---|---|---|",
            *rows,
            "",
            f"```{{toctree}}\n:hidden:\n\n{contents}\n```",
            "",
        ]
    )


def prose(member: Member) -> str | None:
    """Return the member's file in docs/members, or None."""
    file = DOCS / path(member.axis, member.name)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def title(member: Member) -> str:
    """Return the first line of the member's file, or its name."""
    text = prose(member)
    return text.splitlines()[0].removeprefix("# ") if text else f"`{member.name}`"


def docstring(member: Member) -> str:
    """Return the docstring with the idea: from the class of a pattern, or the file of a configuration."""
    own = inspect.cleandoc(member.cls.__doc__ or "")
    if issubclass(member.cls, Pattern):
        return own
    if shared := described(member.name, member.cls):
        return shared
    module = inspect.cleandoc("x\n" + (sys.modules[member.cls.__module__].__doc__ or ""))[2:]
    return f"{module.strip()}\n\n{own}" if module else own


def has_equation(member: Member) -> bool:
    """Return whether the member's file or docstring has an equation."""
    text = prose(member)
    return (text is not None and "$$" in text) or any(equation for equation, _ in blocks(docstring(member)))


def page(member: Member) -> str:
    """Return the page of a member."""
    text = prose(member)
    head, body = text.split("\n", 1) if text else (f"# {title(member)}", "")
    parts = [
        head,
        facts(member),
        markdown(docstring(member).split("\n\n")[0]) if text else "",
        body.strip(),
        picture(member),
        code(member),
        options(member),
        in_full(member, skip=bool(text)),
        measured(member),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def in_full(member: Member, skip: bool) -> str:
    """Return the docstring; `skip` omits its first paragraph, which the page shows above."""
    doc = docstring(member)
    doc = doc.partition("\n\n")[2] if skip else doc
    return f"## In full\n\n{markdown(doc)}" if doc.strip() else ""


def facts(member: Member) -> str:
    """Return the axis, name, source and limitations of a member."""
    cls = member.cls
    rows = [f"**Axis** [{TITLES.get(member.axis, member.axis)}](index.md)", f"**Written** `{member.name}`"]
    if cls.paper:
        rows.append(f"**Source** {cls.paper}")
    if getattr(cls, "causal", True) is False:
        rows.append("**Encoders only**, it has no causal form")
    eager = getattr(cls, "eager", None)
    if eager:
        rows.append(f"**Not in one compiled graph**: {eager}")
    if not in_package(cls):
        rows.append(f"**From** `{cls.__module__}`")
    return ":::{container} facts\n\n" + "\n\n".join(rows) + "\n:::"


def picture(member: Member) -> str:
    """Return the picture of a pattern or position scheme, if it exists."""
    folder = {"Pattern": "patterns", "Position": "positions"}.get(member.axis)
    if folder is None or not (DOCS / folder / f"{member.name}.svg").is_file():
        return ""
    what = "Rows are queries, columns are keys" if folder == "patterns" else "By distance, one line per head"
    legend = f"{what}; [how to read it](../../{folder}.md)."
    return f"## Picture\n\n![{member.name}](../../{folder}/{member.name}.svg)\n\n{legend}"


def code(member: Member) -> str:
    """Return code that uses the member: in Python, if it is part of a model, and on the command line."""
    text = python(member)
    fences = [f"```python\n{text}\n```"] if text else []
    return "\n\n".join(["## In code", *fences, f"```sh\n{shell(member)}\n```"])


def options(member: Member) -> str:
    """Return the table of options with types and defaults."""
    fields = [field for field in dataclasses.fields(member.cls) if not field.name.startswith("_")]
    if not fields:
        return ""
    comments, hints, intervals = field_comments(member.cls), type_hints(member.cls), ranges(member.cls)
    rows = []
    for field in fields:
        hint = hints[field.name]
        text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
        text = re.sub(r"\b(?:polyformer|typing|pathlib)\.(?:\w+\.)*", "", text)
        text = re.sub(r"^Optional\[(.+)\]$", r"\1 | None", text).replace("|", "\\|")
        limits = f", {intervals[field.name]}" if field.name in intervals else ""
        rows.append(
            f"| `{field.name}` | `{text}`{limits} | {default(field)} | {comments.get(field.name, '')} |"
        )
    return "\n".join(["## Options", "", "| option | type | default | |", "|---|---|---|---|", *rows])


def default(field: dataclasses.Field) -> str:
    """Return a default as written in a file, or "required"."""
    if field.default is not dataclasses.MISSING:
        return f"`{expression(field.default)}`".replace("|", "\\|")
    if field.default_factory is not dataclasses.MISSING:
        return f"`{expression(field.default_factory())}`".replace("|", "\\|")
    return "required"


def field_comments(cls: type[Config] | type[Pattern]) -> dict[str, str]:
    """Return the comments on the fields of a dataclass and its base classes."""
    result: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            pairs = re.findall(r"^    (\w+): [^#\n]+?  # (.+)$", inspect.getsource(base), re.MULTILINE)
            result |= {name: markdown(comment) for name, comment in pairs}
    return result


def measured(member: Member) -> str:
    """Return links to the pages of docs/results that mention the member."""
    title_words = re.sub(r"[`*]", "", title(member)).lower()
    names = [f"`{member.name}`", f"`{member.name}(", f"{member.name}(", f'"{member.name}"']
    links = []
    for file in sorted((DOCS / "results").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if any(name in text for name in names) or (len(title_words) > 4 and title_words in text.lower()):
            heading = text.partition("\n")[0].removeprefix("# ")
            links.append(f"[{heading}](../../results/{file.name})")
    return f"## Measured\n\nResults: {', '.join(links)}." if links else ""


def with_links(table: str) -> str:
    """Return the table of members with links to their pages."""
    known = {(member.axis, member.name) for member in members()}

    def linked(match: re.Match[str]) -> str:
        axis, name = match.groups()
        return f"| {axis} | [`{name}`]({path(axis, name)}) |" if (axis, name) in known else match[0]

    return re.sub(r"^\| (\w+) \| `([^`]+)` \|", linked, table, flags=re.MULTILINE)
