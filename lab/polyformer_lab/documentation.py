"""Write docs/claims.md and docs/seeds.md: `python -m polyformer_lab.documentation [--check]`.

docs/seeds.md and docs/vi/seeds.md have the statements of five lecture texts and their demonstrations.

docs/seeds/*.yaml has a file per text: its title, and sections with a place and rows. A row has

    statement   in both languages, as every text
    shown_by    a list: `tests/FILE.py::test_NAME`, `claim:NAME`, `preset:NAME`, `polyformer COMMAND ...`,
                `examples/FILE`, or a page or picture in docs with an optional `#anchor`
    verdict     of `VERDICTS`; a row without a verdict has the recorded verdict of its first claim
    erratum     for an error of the text: the heading of its correction in docs/errata.md
    note        optional; for a missing demonstration the smallest experiment that would show the statement
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from polyformer.cli.documentation import DOCS, ROOT, has_check_option, update
from polyformer.core.config import Config
from polyformer.core.files import read_bounded
from polyformer.core.parsing import parse_yaml
from polyformer.core.ranges import YAML_BYTES
from polyformer_lab.catalogue import BAR, HEADING, Citations, anchor, claims_page, recorded, result_pages

TEXTS = ("survey", "chapter", "linformer", "lecture", "notes")

WRONG, MISSING = "wrong in the document", "missing"

VERDICTS = {
    "shown": "có chứng minh",
    "reproduced": "tái lập được",
    "not reproduced": "không tái lập được",
    "not at this scale": "chưa quyết định được ở quy mô này",
    "undecided": "chưa ngã ngũ giữa các seed",
    WRONG: "tài liệu viết nhầm",
    MISSING: "còn thiếu",
}
"""The verdicts with their names in Vietnamese."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words(Config):
    """A text in both languages."""

    en: str = ""
    vi: str = ""

    def of(self, language: str) -> str:
        """Return the text in `language`: en or vi."""
        return self.vi if language == "vi" else self.en


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement(Config):
    """A row: a statement, its demonstrations and its verdict."""

    statement: Words = Words()
    shown_by: tuple[str, ...] = ()
    verdict: str = ""
    erratum: str = ""
    note: Words = Words()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section(Config):
    """The statements of a section of a text."""

    place: Words = Words()
    rows: tuple[Statement, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Config):
    """A text with its title and its sections."""

    title: Words = Words()
    sections: tuple[Section, ...] = ()

    def rows(self) -> Iterator[Statement]:
        """Yield all rows in order."""
        for section in self.sections:
            yield from section.rows


def read_texts(folder: Path, citations: Citations) -> dict[str, Text]:
    """Read the files of `TEXTS`, with the verdicts of claims; raises `InputError` for a malformed file."""
    files = {name: folder / f"{name}.yaml" for name in TEXTS}
    texts = {
        name: Text.from_dict(parse_yaml(read_bounded(file, YAML_BYTES), file), f"docs/seeds/{name}")
        for name, file in files.items()
    }
    return {name: _resolved(text, citations) for name, text in texts.items()}


def find_problems(texts: Mapping[str, Text], citations: Citations) -> list[str]:
    """Return a line for each row that is incomplete or cites something that does not exist."""
    return [
        f"docs/seeds/{name}.yaml: {row.statement.en!r}: {problem}"
        for name, text in texts.items()
        for row in text.rows()
        for problem in _problems(row, citations)
    ]


def statement_pages(docs: Path, texts: Mapping[str, Text], citations: Citations) -> dict[Path, str]:
    """Return both pages by their paths, for texts without problems."""
    headings = [
        HEADING.findall((docs / page).read_text(encoding="utf-8")) for page in ("errata.md", "vi/errata.md")
    ]
    errata = dict(zip(*headings, strict=True))  # a translation has the headings of its original
    return {
        docs / "seeds.md": _page(texts, "en", {heading: heading for heading in errata}, citations),
        docs / "vi" / "seeds.md": _page(texts, "vi", errata, citations),
    }


def _resolved(text: Text, citations: Citations) -> Text:
    """Return the text with a verdict in each row that has a claim."""
    sections = [
        dataclasses.replace(
            section,
            rows=tuple(
                dataclasses.replace(row, verdict=row.verdict or citations.verdict(row.shown_by))
                for row in section.rows
            ),
        )
        for section in text.sections
    ]
    return dataclasses.replace(text, sections=tuple(sections))


def _problems(row: Statement, citations: Citations) -> Iterator[str]:
    if not (row.statement.en and row.statement.vi):
        yield "statement: expected an English and a Vietnamese text"
    if row.verdict not in VERDICTS:
        yield f"verdict: expected one of {', '.join(VERDICTS)} or a recorded claim, got {row.verdict!r}"
    if bool(row.note.en) != bool(row.note.vi):
        yield "note: expected both languages or none"
    if (row.verdict == WRONG) != bool(row.erratum):
        yield f"erratum: expected a heading of docs/errata.md exactly for {WRONG!r}, got {row.erratum!r}"
    if row.verdict == MISSING and not row.note.en:
        yield "note: expected the smallest demonstration that would show the statement"
    if row.verdict not in (WRONG, MISSING) and not row.shown_by:
        yield "shown_by: expected a test, claim, page, picture, preset, example or command"
    if row.erratum and not citations.has_heading("errata.md", row.erratum):
        yield f"erratum: docs/errata.md has no heading {row.erratum!r}"
    yield from (f"shown_by: {cited}: {why}" for cited in row.shown_by for why in citations.problems(cited))


def _page(texts: Mapping[str, Text], language: str, errata: dict[str, str], citations: Citations) -> str:
    words = PAGE[language]
    names = {verdict: VERDICTS[verdict] if language == "vi" else verdict for verdict in VERDICTS}
    counts = {name: Counter(row.verdict for row in text.rows()) for name, text in texts.items()}
    lines = [
        words["head"],
        f"| {words['text']} | {' | '.join(names.values())} | {words['all']} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for name, text in texts.items():
        title = text.title.of(language)
        lines.append(_counted(f"[{title}](#{anchor(title)})", counts[name]))
    lines.append(_counted(words["all"], sum(counts.values(), Counter())))
    for text in texts.values():
        lines.append(f"\n## {text.title.of(language)}")
        for section in text.sections:
            lines += [f"\n### {section.place.of(language)}\n", words["columns"], "|---|---|---|"]
            lines += [_row(row, language, names, errata, citations) for row in section.rows]
    return "\n".join(lines) + "\n"


def _counted(label: str, counts: Counter[str]) -> str:
    return f"| {label} | {' | '.join(str(counts[verdict]) for verdict in VERDICTS)} | {counts.total()} |"


def _row(
    row: Statement, language: str, names: dict[str, str], errata: dict[str, str], citations: Citations
) -> str:
    verdict, up = names[row.verdict], "../" if language == "vi" else ""
    shown = [citations.rendered(cited, up) for cited in row.shown_by]
    if row.erratum:
        link = f"errata.md#{anchor(errata[row.erratum])}"
        verdict, shown = f"[{verdict}]({link})", shown or [f"[{PAGE[language]['errata']}]({link})"]
    if row.note.en:
        verdict = f"{verdict}. {row.note.of(language)}"
    cells = row.statement.of(language), "<br>".join(shown) or "-", verdict
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


PAGE = {
    "en": {
        "head": """# The five texts, statement by statement

Every testable statement of the five Vietnamese texts that accompanied the writing of this library, with
its place, its demonstration here and the verdict. Their errors are in the [errata](errata.md). `make docs`
makes this page from `docs/seeds/*.yaml` and checks that every test, claim, page and command that it cites
exists. *[Bằng tiếng Việt](vi/seeds.md)*

- *Shown*: a test, a page or a preset demonstrates it.
- *Reproduced*, *not reproduced*: by the rule of a [claim](claims.md), or by figures in a page of
  [results](results.md). *Undecided*: its seeds differ.
- *Missing*: nothing here demonstrates all of it. The note names the smallest demonstration.
""",
        "errata": "errata",
        "text": "text",
        "all": "all",
        "columns": "| statement | shown by | verdict |",
    },
    "vi": {
        "head": """# Năm tài liệu, từng câu

Mọi câu có thể kiểm chứng trong năm tài liệu tiếng Việt đi cùng thư viện này: vị trí của câu,
thứ chứng minh nó ở đây, và kết luận. Lỗi của các tài liệu: [những chỗ viết nhầm](errata.md).
`make docs` tạo trang này từ `docs/seeds/*.yaml` và kiểm tra rằng mọi bài kiểm thử, khẳng định,
trang và lệnh được dẫn đều tồn tại. *[In English](../seeds.md)*

- *Có chứng minh*: một bài kiểm thử, một trang hay một cấu hình thể hiện câu ấy.
- *Tái lập được*, *không tái lập được*: theo luật đặt trước của một [khẳng định](../claims.md),
  hoặc theo số liệu trong một trang [kết quả](../results.md). *Chưa ngã ngũ*: các seed cho kết luận khác nhau.
- *Còn thiếu*: chưa có gì chứng minh trọn vẹn; ghi chú nêu phép thử nhỏ nhất.
""",
        "errata": "chỗ viết nhầm",
        "text": "tài liệu",
        "all": "tất cả",
        "columns": "| câu | chứng minh | kết luận |",
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Write the pages; with `--check` report stale pages (status 1) and write nothing.

    Rows of docs/seeds that are incomplete or cite something that does not exist are listed, with status 1.
    """
    check = has_check_option(arguments, __doc__ or "")
    results = result_pages(DOCS)
    citations = Citations(ROOT, recorded(results))
    texts = read_texts(DOCS / "seeds", citations)
    if problems := find_problems(texts, citations):
        print("\n".join(problems))
        return 1
    pages = {DOCS / "claims.md": claims_page(results)} | statement_pages(DOCS, texts, citations)
    return int(bool(update(pages, check)) and check)


if __name__ == "__main__":
    sys.exit(main())
