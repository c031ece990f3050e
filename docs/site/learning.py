"""The path for learners, the same list in all places: `python docs/site/learning.py [--check]` writes it.

A page has the list between `<!-- learning -->` and `<!-- /learning -->`.
"""

import posixpath
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "en",
    "docs/start.md": "en",
    "docs/site/index.md": "en",
    "docs/vi/README.md": "vi",
    "docs/vi/start.md": "vi",
}
"""The pages with the list, and their languages."""

START, END = "<!-- learning -->\n", "<!-- /learning -->"


class Step(NamedTuple):
    """A step of the path.

    minutes: processor time of a slow core, rounded up. english, vietnamese: the title, and what it teaches.
    translation: the page in Vietnamese, if there is one.
    """

    file: str
    minutes: int
    english: tuple[str, str]
    vietnamese: tuple[str, str]
    translation: str | None = None


STEPS = (
    Step(
        "examples/plain_transformer.py",
        1,
        ("A plain Transformer", "the model of 2017 in 300 lines of PyTorch, with training and beam search"),
        ("Transformer thuần", "mô hình năm 2017 trong 300 dòng PyTorch, cả huấn luyện lẫn tìm kiếm chùm"),
    ),
    Step(
        "docs/tutorials/translator.py",
        1,
        ("A translator", "attention from its equation, and a model of this library that translates numbers"),
        ("Máy dịch", "attention từ phương trình, và một mô hình của thư viện này dịch các số"),
        "docs/vi/tutorials/translator.md",
    ),
    Step(
        "docs/tutorials/positions.py",
        2,
        ("Positions", "how a model knows the order of tokens, and why counting them is not enough"),
        ("Vị trí", "mô hình biết thứ tự các token thế nào, và vì sao chỉ đếm thì không đủ"),
        "docs/vi/tutorials/positions.md",
    ),
    Step(
        "docs/tutorials/own_attention.py",
        1,
        ("Your own attention", "your own pattern, position scheme and mechanism, each in ten lines, tested"),
        ("Cơ chế chú ý của bạn", "mẫu, cách mã hóa vị trí và cơ chế của bạn, mỗi cái mười dòng, có kiểm thử"),
        "docs/vi/tutorials/own_attention.md",
    ),
    Step(
        "docs/tutorials/memories.py",
        1,
        ("Memories", "what a model knows of the earlier segments of a text, and what that costs"),
        ("Bộ nhớ", "mô hình biết gì về các đoạn trước của văn bản, và giá phải trả"),
        "docs/vi/tutorials/memories.md",
    ),
    Step(
        "docs/tutorials/longer_texts.py",
        1,
        ("Long texts", "how an encoder reads texts of eight times its length, and what that gains"),
        ("Văn bản dài", "bộ mã hóa đọc văn bản dài gấp tám lần giới hạn của nó thế nào, và được lợi gì"),
        "docs/vi/tutorials/longer_texts.md",
    ),
)


def table(page: str, language: str) -> str:
    """Return the list as a Markdown table, with links that fit the page."""
    vietnamese = language == "vi"
    heading = (
        "| bài | dạy gì | thời gian chạy |" if vietnamese else "| step | what it teaches | running time |"
    )
    lines = [heading, "|---|---|---|"]
    for number, step in enumerate(STEPS, 1):
        title, teaches = step.vietnamese if vietnamese else step.english
        file = (step.translation if vietnamese else None) or step.file
        time = f"khoảng {step.minutes} phút" if vietnamese else f"about {_minutes(step.minutes)}"
        note = " (tiếng Anh)" if vietnamese and step.translation is None else ""
        lines.append(f"| {number}. [{title}]({link(page, file)}){note} | {teaches} | {time} |")
    return "\n".join(lines) + "\n"


def _minutes(number: int) -> str:
    return "1 minute" if number == 1 else f"{number} minutes"


def link(page: str, file: str) -> str:
    """Return the link from a page to a file; the home page of the site links to pages of the site."""
    if page == "docs/site/index.md":
        return f"{file.removeprefix('docs/').removesuffix('.py')}.md"
    return posixpath.relpath(file, posixpath.dirname(page) or ".")


def updated(page: str) -> str:
    """Return the text of a page with the list of now."""
    head, rest = (ROOT / page).read_text(encoding="utf-8").split(START, 1)
    return f"{head}{START}{table(page, PAGES[page])}{END}{rest.split(END, 1)[1]}"


def main(arguments: list[str]) -> int:
    """Write the list into all pages; with `--check` only name the pages where it differs, with status 1."""
    stale = [page for page in PAGES if updated(page) != (ROOT / page).read_text(encoding="utf-8")]
    for page in stale:
        print(f"{page}: the path for learners changed; run `python docs/site/learning.py`")
        if "--check" not in arguments:
            (ROOT / page).write_text(updated(page), encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
