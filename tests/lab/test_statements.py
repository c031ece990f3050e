"""The pages of statements: they are complete and up to date, and every fault of a row is named."""

import dataclasses
from pathlib import Path

import pytest

from polyformer_lab.catalogue import Citations, recorded, result_pages
from polyformer_lab.documentation import (
    MISSING,
    VERDICTS,
    WRONG,
    Section,
    Statement,
    Text,
    Words,
    find_problems,
    read_texts,
    statement_pages,
)

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CITATIONS = Citations(ROOT, recorded(result_pages(DOCS)))
TEXTS = read_texts(DOCS / "seeds", CITATIONS)
BOTH = Words(en="one", vi="một")
TEST = "tests/lab/test_statements.py::test_rows_are_complete_and_cite_what_exists"


def test_rows_are_complete_and_cite_what_exists():
    assert not find_problems(TEXTS, CITATIONS)
    counts = {name: len(list(text.rows())) for name, text in TEXTS.items()}
    assert min(counts.values()) > 40
    assert {row.verdict for text in TEXTS.values() for row in text.rows()} <= VERDICTS.keys()


def test_pages_are_up_to_date_and_have_a_line_for_each_row():
    pages = statement_pages(DOCS, TEXTS, CITATIONS)
    assert {path.relative_to(DOCS).as_posix() for path in pages} == {"seeds.md", "vi/seeds.md"}
    rows = sum(len(list(text.rows())) for text in TEXTS.values())
    sections = sum(len(text.sections) for text in TEXTS.values())
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page, "run `make docs`"
        lines = [line for line in page.splitlines() if line.startswith("| ")]
        assert len(lines) == rows + sections + len(TEXTS) + 2  # heads of tables, and the table of counts


def text_of(row: Statement) -> dict[str, Text]:
    return {"notes": Text(title=BOTH, sections=(Section(place=BOTH, rows=(row,)),))}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"statement": Words(en="one")}, "statement: expected an English and a Vietnamese text"),
        ({"verdict": "true"}, "verdict: expected one of shown, reproduced"),
        ({"verdict": ""}, "or a recorded claim, got ''"),
        ({"shown_by": ()}, "shown_by: expected a test, claim"),
        ({"note": Words(en="one")}, "note: expected both languages or none"),
        ({"verdict": MISSING}, "note: expected the smallest demonstration"),
        ({"verdict": WRONG}, "erratum: expected a heading"),
        ({"verdict": WRONG, "erratum": "No such"}, "docs/errata.md has no heading 'No such'"),
        ({"shown_by": (TEST + "s",)}, "there is no such test"),
        ({"shown_by": ("tests/no.py::test_a",)}, "there is no such test"),
        ({"shown_by": ("claim:no",)}, "no claim of this name is recorded"),
        ({"shown_by": ("preset:no",)}, "there is no such preset"),
        ({"shown_by": ("polyformer fly",)}, "there is no such command"),
        ({"shown_by": ("polyformer reproduce no",)}, "there is no study 'no'"),
        ({"shown_by": ("no.md",)}, "there is no such page"),
        ({"shown_by": ("examples/no.py",)}, "there is no such page, picture or example"),
        ({"shown_by": ("results.md#no",)}, "the page has no heading with the anchor 'no'"),
    ],
)
def test_faults_are_named(changes: dict[str, object], problem: str):
    good = Statement(statement=BOTH, shown_by=(TEST,), verdict="shown")
    assert not find_problems(text_of(good), CITATIONS)
    (fault,) = find_problems(text_of(dataclasses.replace(good, **changes)), CITATIONS)
    assert fault.startswith("docs/seeds/notes.yaml: 'one': " if "statement" not in changes else "docs/seeds")
    assert problem in fault


def test_a_row_has_the_verdict_of_its_first_claim():
    assert CITATIONS.verdict(("results.md", "claim:warmup", "claim:batch-norm")) == "reproduced"
    assert CITATIONS.verdict((TEST,)) == CITATIONS.verdict(("claim:no",)) == ""
