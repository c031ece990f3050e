"""A page for each member: none is missing, each has an equation, and its code runs."""

import re
import sys
import types

import pytest
import torch
from member_pages import DOCS, code, docstring, has_equation, page, pages, path, with_links
from snippets import expression, member_text, python, shell

import polyformer.cli.commands as commands
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.cli.documentation import Member, members
from polyformer.cli.plots.svg import described
from polyformer.core.config import Config
from polyformer.core.registry import in_package

MEMBERS = [member for member in members() if in_package(member.cls)]
TRAINING = {"Task", "Optimizer", "Schedule", "Trunk", "Tuning"}
"""Axes of a training: what their members do is said in words."""

AXES = sorted({member.axis for member in MEMBERS})


def test_every_member_has_a_page_and_every_file_a_member():
    wanted = {path(member.axis, member.name) for member in MEMBERS}
    assert wanted <= pages().keys()
    files = {file.relative_to(DOCS).as_posix() for file in (DOCS / "members").rglob("*.md")}
    assert not files - wanted, "a page of no member"


def test_every_member_of_a_model_has_an_equation():
    lacking = [f"{m.axis} {m.name}" for m in MEMBERS if m.axis not in TRAINING and not has_equation(m)]
    assert not lacking, f"say it in docs/members/AXIS/NAME.md or in the docstring: {lacking}"


def test_a_table_of_equations_has_a_row_for_every_member_of_its_file():
    """A file with a row for one of its members has a row for each."""
    configs = [member for member in MEMBERS if member.axis != "Pattern"]
    tables = {m.cls.__module__ for m in configs if described(m.name, m.cls)}
    assert len(tables) > 3
    assert not [m.name for m in configs if m.cls.__module__ in tables and not described(m.name, m.cls)]


def test_pages_in_the_repository_have_an_equation_and_say_when_to_use_the_member():
    for file in sorted((DOCS / "members").rglob("*.md")):
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# "), file
        assert text.count("$$") == 2, file
        assert "**Use it**" in text, file
        assert "**Avoid it**" in text, file
        for link in re.findall(r"\]\(([^)#:]+)", text):
            assert (file.parent / link).exists(), f"{file}: {link}"


@pytest.mark.parametrize("axis", AXES)
def test_the_code_of_its_page_runs(axis: str):
    for member in MEMBERS:
        if member.axis != axis:
            continue
        text = python(member)
        if text is None:
            assert axis in TRAINING, member.name
        else:
            assert text in code(member), member.name
            names: dict = {}
            torch.manual_seed(0)
            exec(compile(text, f"the code of {axis} {member.name}", "exec"), names)
            assert "out" in names or "hidden" in names, member.name
        assert shell(member).split()[1] in commands.COMMANDS, member.name


def test_its_text_is_read_back_as_it_was():
    for member in MEMBERS:
        if issubclass(member.cls, Config):
            family = next(cls for cls in member.cls.__mro__ if Config in cls.__bases__)
            config = family.from_dict(member_text(member))
            assert type(config) is member.cls, member.name
            assert expression(config) == member_text(member)


def test_a_member_without_a_file_has_a_page_of_its_docstring():
    class Odd(PositionConfig):
        """Biases of odd distances."""

        kind, paper = "odd", "Nobody 2026"

    Odd.__module__ = "somebody.odd"
    module = types.ModuleType(
        "somebody.odd", "Odd places move a score.\n\n    score_ij = q_i . k_j + b (i - j) % 2\n"
    )
    sys.modules["somebody.odd"] = module
    try:
        text = page(Member("Position", "odd", Odd))
    finally:
        del sys.modules["somebody.odd"], PositionConfig.kinds["odd"]
    assert text.startswith("# `odd`\n")
    assert "**From** `somebody.odd`" in text
    assert "score_ij = q_i . k_j + b (i - j) % 2" in text


def test_a_member_without_an_equation_is_named():
    class Silent(Pattern):
        """Nothing is said."""

        def allows(self, context, b, h, q_idx, kv_idx):
            return q_idx == kv_idx

    member = Member("Pattern", "Silent", Silent)
    del Pattern.registry["Silent"]
    assert docstring(member) == "Nothing is said."
    assert not has_equation(member)


def test_the_table_of_members_links_to_their_pages():
    table = (DOCS / "members.md").read_text(encoding="utf-8")
    linked = with_links(table)
    assert len(re.findall(r"^\| \w+ \| \[`", linked, re.MULTILINE)) == len(MEMBERS)
    for link in re.findall(r"\]\((members/[^)]+)", table):
        assert (DOCS / link).is_file()


def test_a_letter_of_a_size_is_no_vector_of_the_equation():
    """What a page counts its cost by, it does not index in its equation."""
    checked = 0
    for file in sorted((DOCS / "members").rglob("*.md")):
        text = file.read_text(encoding="utf-8")
        equation = re.sub(r"\\\w+", " ", text.split("$$")[1])
        cost = re.search(r"\*\*Cost\.\*\*(.*?)(?:\n\n|\Z)", text, re.DOTALL)
        if cost is None:
            continue
        # A single letter may name a matrix of the equation.
        formulas = " ".join(part for part in re.findall(r"\$(.*?)\$", cost[1]) if len(part) > 1)
        sizes = set(re.findall(r"([A-Z])(?![_^'])", re.sub(r"\\\w+", " ", formulas)))
        checked += bool(sizes)
        assert not sizes & set(re.findall(r"([A-Z])_", equation)), file.name
    assert checked > 5


def test_the_equation_of_deberta_is_what_the_default_computes():
    """Both terms of positions at the distance from the query to the key; the paper's mirror is an option."""
    assert not PositionConfig.from_dict("deberta").mirrored
    equation, rest = (DOCS / "members/position/deberta.md").read_text(encoding="utf-8").split("$$")[1:]
    assert equation.count(r"\delta(i,j)") == 2
    assert r"\delta(j,i)" not in equation
    assert r"q^r_{\delta(j,i)}" in rest
    assert "mirrored" in rest
