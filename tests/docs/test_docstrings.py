"""Docstrings as Markdown and as reStructuredText."""

import inspect

import docutils.core
from docstrings import markdown, rst

from polyformer.cli.documentation import members

DOC = """Scores |i - j| * x_, with `code` and `two
lines`s.

    y = a * b_i        c

    z = |y|

- an item that goes on
  in a second line

The end."""


def test_blocks_are_kept_and_accidental_markup_is_escaped():
    text = markdown(DOC)
    assert "\\*" in text
    assert "```text\ny = a * b_i        c\n\nz = |y|" in text
    assert text.endswith("The end.")


def test_every_docstring_of_a_member_is_valid_restructuredtext():
    for _, _, cls in members():
        for doc in (cls.__doc__ or "", inspect.getmodule(cls).__doc__ or ""):
            settings = {"report_level": 2, "halt_level": 2}
            docutils.core.publish_doctree(rst(inspect.cleandoc(doc)), settings_overrides=settings)
