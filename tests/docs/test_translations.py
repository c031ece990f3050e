"""Translations follow what they translate, and the pages beside them name only what there is."""

import re
from pathlib import Path

import pytest
import translations
from member_pages import path
from tutorials import cells

from polyformer.cli.documentation import members
from polyformer.models.presets import MODELS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN = ("glossary.md", "seeds.md", "survey.md")
"""Pages of docs/vi that translate none, or are generated in both languages."""


def test_no_translation_is_behind():
    assert not translations.stale()


def test_every_page_says_what_it_translates():
    pages = [page for page in translations.pages() if page.name not in OWN]
    assert len(pages) >= 3
    assert not [page for page in pages if not translations.MARK.search(page.read_text(encoding="utf-8"))]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """An English page and its translation, as of now."""
    folder = tmp_path / "docs" / "vi"
    folder.mkdir(parents=True)
    monkeypatch.setattr(translations, "DOCS", folder.parent)
    english, ours = folder.parent / "a.md", folder / "a.md"
    english.write_text("# A\n\nOne.\n\n```sh\nls  # list\n# not a heading\n```\n\n## B, c\n\nTwo.\n")
    mark = "<!-- ../a.md#{} 0000000000000000 -->\n"
    ours.write_text(
        f"# Á\n{mark.format('a')}\nMột.\n\n```sh\nold\n```\n\n## Bê\n{mark.format('b-c')}\nHai.\n"
    )
    translations.renew(ours)
    assert not translations.stale()
    return english, ours


def test_only_the_section_that_changed_is_named(pair: tuple[Path, Path]):
    english, ours = pair
    english.write_text(english.read_text().replace("Two.", "Three."))
    (line,) = translations.stale()
    assert "a.md#b-c changed" in line
    assert line.endswith("python docs/site/translations.py --renewed docs/vi/a.md")
    translations.renew(ours)
    assert not translations.stale()


def test_lines_may_break_elsewhere_and_code_is_copied(pair: tuple[Path, Path]):
    english, ours = pair
    assert "Một.\n\n```sh\nls  # list\n# not a heading\n```\n\n## Bê" in ours.read_text()
    english.write_text(english.read_text().replace("One.\n", "One.\n\n\n"))
    assert not translations.stale()


def test_what_is_gone_is_named(pair: tuple[Path, Path]):
    english, ours = pair
    english.write_text("# A\n\nOne.\n")
    assert translations.stale()[-1] == "docs/vi/a.md: ../a.md has no b-c: it has a"
    with pytest.raises(ValueError, match="the English text has 0 blocks of code, expected the same number"):
        translations.renew(ours)
    english.unlink()
    assert translations.stale()[0] == "docs/vi/a.md: no file ../a.md"


@pytest.mark.parametrize("name", ["errata.md", "vi/errata.md"])
def test_errata_name_tests_that_there_are(name: str):
    text = (DOCS / name).read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    for file, function in named:
        assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{function}"


def test_errata_have_the_same_equations_and_tests_in_both_languages():
    kept = re.compile(r"\$\$.*?\$\$|`tests/[^`]+`", re.DOTALL)
    english, ours = (
        [" ".join(part.split()) for part in kept.findall((DOCS / name).read_text(encoding="utf-8"))]
        for name in ("errata.md", "vi/errata.md")
    )
    assert english == ours


@pytest.mark.parametrize("page", sorted(["errata.md", *(f"vi/{p.name}" for p in translations.pages())]))
def test_members_that_are_linked_exist(page: str):
    known = {path(member.axis, member.name) for member in members()}
    for file in DOCS.glob(page):
        linked = re.findall(r"\]\((?:\.\./)*(members/\w+/\w+\.md)\)", file.read_text(encoding="utf-8"))
        assert set(linked) <= known, set(linked) - known


def test_the_survey_names_members_and_presets_that_exist():
    rows = [
        line for line in (DOCS / "vi" / "survey.md").read_text(encoding="utf-8").splitlines() if "`" in line
    ]
    cells = [line.rstrip("| ").rsplit("|", 1)[-1] for line in rows if line.startswith("| ")]
    named = {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}
    assert len(named) > 60
    assert named <= {member.name for member in members()} | {*MODELS.names()}


@pytest.mark.parametrize("page", sorted((DOCS / "vi" / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_a_translated_tutorial_is_whole(page: Path):
    """It has the code of the script in its order, and is behind if the code changes."""
    text, place = page.read_text(encoding="utf-8"), 0
    for cell in cells((DOCS / "tutorials" / f"{page.stem}.py").read_text(encoding="utf-8")):
        if not cell.prose:
            place = text.index(f"```python\n{cell.text}\n```\n", place)


def test_changed_code_of_a_tutorial_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "docs" / "vi" / "tutorials"
    folder.mkdir(parents=True)
    script = tmp_path / "docs" / "tutorials" / "a.py"
    script.parent.mkdir()
    monkeypatch.setattr(translations, "DOCS", tmp_path / "docs")
    monkeypatch.setattr("tutorials.FOLDER", script.parent)
    script.write_text("# %% [markdown]\n# # A\n\n# %%\nprint(1)\n")
    ours = folder / "a.md"
    ours.write_text("<!-- ../../tutorials/a.py#1 0000000000000000 -->\n# Á\n")
    translations.renew(ours)
    assert not translations.stale()
    assert "# Á\n\n<!-- code -->\n```python\nprint(1)\n```\n" in ours.read_text()
    script.write_text(script.read_text().replace("print(1)", "print(2)"))
    (line,) = translations.stale()
    assert line.startswith("docs/vi/tutorials/a.md: the code after ../../tutorials/a.py#1 changed; python")
    translations.renew(ours)
    assert "print(2)" in ours.read_text()
    assert "print(1)" not in ours.read_text()
