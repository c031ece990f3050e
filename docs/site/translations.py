"""Check whether translations are up to date.

Marks in a page of docs/vi name the English text that it follows, with the fingerprint of that text:

    <!-- ../start.md#install 0123456789abcdef -->        the section "Install", up to the next heading
    <!-- ../errata.md 0123456789abcdef -->               a whole page
    <!-- ../../tutorials/a.py#3 0123456789abcdef -->     the third text of a tutorial

A mark is below the heading of its text. A text of a tutorial ends at `<!-- code -->`; the code and its output
follow, so that the page is the whole tutorial. `python docs/site/translations.py` lists outdated texts. After
you update a text, `python docs/site/translations.py --renewed PAGE` renews the marks of the page and copies
the code from the English page or script.
"""

import hashlib
import re
import sys
from pathlib import Path

from tutorials import cells, code_after_texts, page

DOCS = Path(__file__).parents[1]
MARK = re.compile(r"<!-- (?P<path>[\w./-]+)(?:#(?P<part>[\w-]+))? (?P<hash>[0-9a-f]{16}) -->\n")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
CODE = "<!-- code -->\n"
"""The line between a text of a tutorial and the code that follows it."""

COMMAND = "python docs/site/translations.py"
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def pages() -> list[Path]:
    """Return all pages of docs/vi."""
    return sorted((DOCS / "vi").rglob("*.md"))


def original(translation: Path, mark: re.Match[str]) -> str:
    """Return the English text of a mark; raises `ValueError` if there is none."""
    path = translation.parent / mark["path"]
    if not path.is_file():
        raise ValueError(f"no file {mark['path']}")
    text = path.read_text(encoding="utf-8")
    if mark["part"] is None:
        return text
    parts = texts(text) if path.suffix == ".py" else sections(text)
    if mark["part"] not in parts:
        raise ValueError(f"{mark['path']} has no {mark['part']}: it has {', '.join(parts)}")
    return parts[mark["part"]]


def texts(script: str) -> dict[str, str]:
    """Return the texts of a tutorial, numbered from 1."""
    prose = [cell.text for cell in cells(script) if cell.prose]
    return {str(number): text for number, text in enumerate(prose, 1)}


def sections(text: str) -> dict[str, str]:
    """Return the text between each heading and the next, by the anchor of the heading."""
    code = [match.span() for match in FENCE.finditer(text)]
    headings = [
        match
        for match in HEADING.finditer(text)
        if not any(start < match.start() < end for start, end in code)
    ]
    ends = [*(match.start() for match in headings[1:]), len(text)]
    return {
        anchor(match[1]): text[match.end() : end].strip()
        for match, end in zip(headings, ends, strict=bool(headings))
    }


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as on GitHub and in the site."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def fingerprint(text: str) -> str:
    """Return the fingerprint of a text, independent of its line breaks."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def stale() -> list[str]:
    """Return a line for each text that changed after its translation, with the command to fix it."""
    lines = []
    for path in pages():
        name = path.relative_to(DOCS.parent)
        text = path.read_text(encoding="utf-8")
        for mark, ours in zip(MARK.finditer(text), translated(text), strict=True):
            what = mark["path"] + (f"#{mark['part']}" if mark["part"] else "")
            try:
                behind = fingerprint(original(path, mark)) != mark["hash"]
            except ValueError as error:
                lines.append(f"{name}: {error}")
                continue
            if behind:
                lines.append(f"{name}: {what} changed; translate it, then {COMMAND} --renewed {name}")
            elif is_script(mark) and with_code(path, mark, ours).strip() != ours.strip():
                lines.append(f"{name}: the code after {what} changed; {COMMAND} --renewed {name}")
    return lines


def renew(path: Path) -> None:
    """Update the fingerprints of a page and the code of its sections."""
    text = path.read_text(encoding="utf-8")
    marks = list(MARK.finditer(text))
    parts = [text[: marks[0].start()]] if marks else [text]
    for mark, ours in zip(marks, translated(text), strict=True):
        english = original(path, mark)
        where = f"{path.name}, {mark[0].strip()}"
        ours = with_code(path, mark, ours) if is_script(mark) else with_code_of(english, ours, where)
        parts.append(mark[0].replace(mark["hash"], fingerprint(english)) + ours)
    path.write_text("".join(parts).rstrip() + "\n", encoding="utf-8")


def translated(text: str) -> list[str]:
    """Return the text of a page after each mark, up to the next."""
    marks = list(MARK.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [text[mark.end() : end] for mark, end in zip(marks, ends, strict=bool(marks))]


def is_script(mark: re.Match[str]) -> bool:
    """Return whether a mark names a text of a tutorial."""
    return mark["path"].endswith(".py")


def with_code(path: Path, mark: re.Match[str], ours: str) -> str:
    """Return a text of a tutorial followed by its code and output."""
    code = code_after_texts((path.parent / mark["path"]).stem)[int(mark["part"]) - 1]
    prose = ours.partition(CODE)[0].strip()
    return f"{prose}\n\n{CODE}{code}\n\n" if code else f"{prose}\n\n"


def with_code_of(english: str, ours: str, where: str) -> str:
    """Return `ours` with its code blocks replaced by the blocks of the English text."""
    theirs = FENCE.findall(english)
    if len(FENCE.findall(ours)) != len(theirs):
        raise ValueError(
            f"{where}: the English text has {len(theirs)} blocks of code, expected the same number"
        )
    blocks = iter(theirs)
    return FENCE.sub(lambda _: next(blocks), ours)


def tutorial(path: Path) -> str:
    """Return a translated tutorial: the texts of `path` with the code and output of the English script."""
    text = path.read_text(encoding="utf-8")
    marks = list(MARK.finditer(text))
    script = path.parent / marks[0]["path"]
    wanted = list(texts(script.read_text(encoding="utf-8")))
    if [mark["part"] for mark in marks] != wanted:
        raise ValueError(f"{path.name}: {script.name} has the texts {', '.join(wanted)}; add a mark for each")
    ours = [part.partition(CODE)[0].strip() for part in translated(text)]
    return page(script.stem, ours, "*Mã nguồn: `docs/tutorials/{name}.py`, một chương trình chạy được ngay.*")


def main(arguments: list[str]) -> int:
    """Print outdated texts; return status 1 if there are any."""
    if arguments[:1] == ["--renewed"]:
        for name in arguments[1:]:
            renew(Path(name).resolve())
    lines = stale()
    print("\n".join(lines) or "no translation is stale")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
