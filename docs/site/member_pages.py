"""A page for each member: what its file in docs/members says, and what the code knows by itself.

docs/members/AXIS/NAME.md has the title, the equation, and when to take the member; one without that file,
as of an installed package, has a page of its docstring. The rest is generated: facts, picture, code, options.
"""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

from docstrings import blocks, markdown
from snippets import expression, python, shell

from polyformer.attention.patterns.base import Pattern
from polyformer.cli.documentation import Member, members
from polyformer.core.config import Config
from polyformer.core.registry import in_package

DOCS = Path(__file__).parents[1]

TITLES = {
    "Mechanism": "Mechanisms",
    "Pattern": "Patterns",
    "Position": "Positions",
    "RopeExtension": "Extensions of RoPE",
    "Memory": "Memories",
    "Depth": "Depth",
    "ExitRule": "Rules of exits",
    "FeedForward": "Feed-forwards",
    "Block": "Blocks",
    "Norm": "Norms",
    "Head": "Heads",
    "Task": "Tasks",
    "Optimizer": "Optimizers",
    "Schedule": "Schedules",
    "Trunk": "Trunks of policies",
}
"""The axes in the order of the contents; others follow."""


def path(axis: str, name: str) -> str:
    """Of a member's page under `docs`, in the site and, where it has a file, in the repository."""
    return f"members/{axis.lower()}/{name}.md"


def pages() -> dict[str, str]:
    """The page of every member, and one for each axis."""
    everything = list(members())
    result = {path(member.axis, member.name): page(member) for member in everything}
    axes = [*TITLES, *sorted({member.axis for member in everything} - {*TITLES})]
    for axis in axes:
        mine = [member for member in everything if member.axis == axis]
        result[f"members/{axis.lower()}/index.md"] = axis_page(axis, mine)
    return result


def axis_page(axis: str, mine: list[Member]) -> str:
    """The members of an axis with their sources, and the contents below it."""
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
    """What docs/members says of a member."""
    file = DOCS / path(member.axis, member.name)
    return file.read_text(encoding="utf-8") if file.is_file() else None


def title(member: Member) -> str:
    """The first line of its file, else its name."""
    text = prose(member)
    return text.splitlines()[0].removeprefix("# ") if text else f"`{member.name}`"


def docstring(member: Member) -> str:
    """The docstring that says the idea: of a pattern's class, of a configuration's module."""
    own = inspect.cleandoc(member.cls.__doc__ or "")
    if issubclass(member.cls, Pattern):
        return own
    module = inspect.cleandoc("x\n" + (sys.modules[member.cls.__module__].__doc__ or ""))[2:]
    return f"{module.strip()}\n\n{own}" if module else own


def has_equation(member: Member) -> bool:
    """Whether its file has a typeset equation, or its docstring one in letters."""
    text = prose(member)
    return (text is not None and "$$" in text) or any(equation for equation, _ in blocks(docstring(member)))


def page(member: Member) -> str:
    """The page of one member."""
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
    """The docstring, without its first paragraph where that stands above."""
    doc = docstring(member)
    doc = doc.partition("\n\n")[2] if skip else doc
    return f"## In full\n\n{markdown(doc)}" if doc.strip() else ""


def facts(member: Member) -> str:
    """The axis, how the member is written, where it comes from, and what it cannot do."""
    cls = member.cls
    rows = [f"**Axis** [{TITLES.get(member.axis, member.axis)}](index.md)", f"**Written** `{member.name}`"]
    if cls.paper:
        rows.append(f"**Source** {cls.paper}")
    if getattr(cls, "causal", True) is False:
        rows.append("**Encoders alone**, it has no causal form")
    eager = getattr(cls, "eager", None)
    if eager:
        rows.append(f"**Not in one compiled graph**: {eager}")
    if not in_package(cls):
        rows.append(f"**From** `{cls.__module__}`")
    return ":::{container} facts\n\n" + "\n\n".join(rows) + "\n:::"


def picture(member: Member) -> str:
    """The drawn pattern or scheme, where there is one."""
    folder = {"Pattern": "patterns", "Position": "positions"}.get(member.axis)
    if folder is None or not (DOCS / folder / f"{member.name}.svg").is_file():
        return ""
    what = "Rows are queries, columns keys" if folder == "patterns" else "By distance, a line for each head"
    legend = f"{what}; [how to read it](../../{folder}.md)."
    return f"## Picture\n\n![{member.name}](../../{folder}/{member.name}.svg)\n\n{legend}"


def code(member: Member) -> str:
    """The member in Python, where it is part of a model, and on the command line."""
    text = python(member)
    fences = [f"```python\n{text}\n```"] if text else []
    return "\n\n".join(["## In code", *fences, f"```sh\n{shell(member)}\n```"])


def options(member: Member) -> str:
    """Its options with types and defaults."""
    fields = [field for field in dataclasses.fields(member.cls) if not field.name.startswith("_")]
    if not fields:
        return ""
    comments = field_comments(member.cls)
    rows = []
    for field in fields:
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        hint = str(field.type) if "[" in str(field.type) or "|" in str(field.type) else kind
        hint = re.sub(r"\b(?:polyformer|typing|pathlib)\.(?:\w+\.)*", "", hint).replace("|", "\\|")
        rows.append(f"| `{field.name}` | `{hint}` | {default(field)} | {comments.get(field.name, '')} |")
    return "\n".join(["## Options", "", "| option | type | default | |", "|---|---|---|---|", *rows])


def default(field: dataclasses.Field) -> str:
    """A default as it is written in a file; nothing where the option must be given."""
    if field.default is not dataclasses.MISSING:
        return f"`{expression(field.default)}`".replace("|", "\\|")
    if field.default_factory is not dataclasses.MISSING:
        return f"`{expression(field.default_factory())}`".replace("|", "\\|")
    return "required"


def field_comments(cls: type[Config] | type[Pattern]) -> dict[str, str]:
    """The comments behind the fields of a dataclass and of those above it."""
    result: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            pairs = re.findall(r"^    (\w+): [^#\n]+?  # (.+)$", inspect.getsource(base), re.MULTILINE)
            result |= {name: markdown(comment) for name, comment in pairs}
    return result


def measured(member: Member) -> str:
    """Links to the sections of results.md that name the member."""
    sections, heading = [], ""
    title_words = re.sub(r"[`*]", "", title(member)).lower()
    names = [f"`{member.name}`", f"`{member.name}(", f"{member.name}(", f'"{member.name}"']
    for line in (DOCS / "results.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:]
        named = any(name in line for name in names) or (len(title_words) > 4 and title_words in line.lower())
        if heading and named and heading not in sections:
            sections.append(heading)
    links = [f"[{heading}](../../results.md#{slug(heading)})" for heading in sections]
    return f"## MeasuredCall\n\nResults: {', '.join(links)}." if links else ""


def slug(heading: str) -> str:
    """The anchor of a heading, as viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def with_links(table: str) -> str:
    """The table of members with a link to the page of each."""
    known = {(member.axis, member.name) for member in members()}

    def linked(match: re.Match[str]) -> str:
        axis, name = match.groups()
        return f"| {axis} | [`{name}`]({path(axis, name)}) |" if (axis, name) in known else match[0]

    return re.sub(r"^\| (\w+) \| `([^`]+)` \|", linked, table, flags=re.MULTILINE)
