"""Links of the site: how they are made to fit, and that broken ones are named."""

import json
from pathlib import Path

import pytest
from links import answers, broken, rewritten
from mathml import mathml
from navigation import HOME
from sphinx.errors import ExtensionError

PAGES = {
    "docs/design.md": "design.md",
    "SECURITY.md": "project/security.md",
    "docs/tutorials/a.py": "tutorials/a.md",
}
OTHERS = {"docs/patterns/Window.svg"}


def test_links_fit_where_the_page_is_and_what_the_site_lacks_is_named():
    text = "[d](../docs/design.md#x) [s](../SECURITY.md) [e](../examples/own-member) [w](https://a.b)\n"
    assert rewritten(text, "docs/tutorials/a.py", PAGES, OTHERS) == (
        "d (`docs/docs/design.md`) s (`docs/SECURITY.md`) e (`docs/examples/own-member`) [w](https://a.b)\n"
    )
    assert rewritten(text, "docs/design.md", PAGES, OTHERS) == (
        "[d](design.md#x) [s](project/security.md) e (`examples/own-member`) [w](https://a.b)\n"
    )
    assert rewritten("[d](docs/design.md)", "SECURITY.md", PAGES, OTHERS) == "[d](../design.md)\n"


def test_pictures_and_scripts_are_found_and_code_is_left_alone():
    text = "![w](patterns/Window.svg) [`a`](tutorials/a.py)\n```\n[x](gone.md)\n```\n"
    assert rewritten(text, "docs/design.md", PAGES, OTHERS) == text.replace("a.py", "a.md")


def test_a_label_may_continue_on_the_next_line():
    text = "the [security\npolicy](../SECURITY.md) of `a\n\nb` [s](../SECURITY.md)\n"
    assert rewritten(text, "docs/design.md", PAGES, OTHERS) == text.replace("../SEC", "project/sec").replace(
        "URITY", "urity"
    )


def test_broken_links_and_fetches_are_named(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<p id="x"><a href="b.html#y">b</a><a href="#x">x</a><a href="c.html">c</a>'
    )
    (tmp_path / "b.html").write_text(
        '<a href="a.html#x">a</a><a href="https://w"></a><script src="https://cdn/m.js">'
    )
    assert broken(tmp_path) == [
        "b.html#y: in a.html",
        "c.html: in a.html",
        "fetches https://cdn/m.js: in b.html",
    ]
    (tmp_path / "b.html").write_text('<p id="y">')
    (tmp_path / "c.html").write_text("")
    assert broken(tmp_path) == []


def test_an_equation_with_an_unknown_command_ends_the_build():
    assert "arg" in mathml(r"h(x) = \argmax\,[x R]", "block")
    with pytest.raises(ExtensionError, match=r"does not know \\arg"):
        mathml(r"\arg\max x", "inline")


def test_what_the_site_has_in_the_place_of_a_file_is_linked():
    assert rewritten("[e](../../README.md)", "docs/vi/a.md", {**HOME, "docs/vi/a.md": "vi/a.md"}, set()) == (
        "[e](../index.md)\n"
    )


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([], "0 addresses of other sites, 0 without an answer"),
        (["working", "broken"], "2 addresses of other sites, 1 without an answer"),
        (["broken", "timeout"], "2 addresses of other sites, 2 without an answer; is there a network?"),
    ],
)
def test_what_other_sites_answered_is_said_in_a_line(states: list[str], said: str):
    rows = [{"uri": f"https://a.b/{i}", "status": state} for i, state in enumerate(states)]
    local = {"uri": "#here", "status": "unchecked"}
    assert answers("\n".join(json.dumps(row) for row in [local, *rows])) == said
