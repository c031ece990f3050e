"""The path for learners is the same in all places, and its programs exist."""

import re
from pathlib import Path

import learning
import pytest

ROOT = Path(__file__).parents[2]


def test_the_path_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]):
    assert learning.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", learning.PAGES)
def test_a_page_that_differs_is_named_and_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in learning.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    text = (tmp_path / page).read_text(encoding="utf-8")
    first = "| 1. [" + next(part for part in text.split("| 1. [")[1:])
    (tmp_path / page).write_text(text.replace(first, first[8:]), encoding="utf-8")
    assert learning.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith(f"{page}: the path for learners changed")
    learning.main([])
    assert (tmp_path / page).read_text(encoding="utf-8") == text


def test_its_programs_exist_and_its_links_fit():
    for page in learning.PAGES:
        if page == "docs/site/index.md":
            continue
        table = (ROOT / page).read_text(encoding="utf-8").split(learning.START)[1].split(learning.END)[0]
        links = re.findall(r"\]\(([^)]+)\)", table)
        assert len(links) == len(learning.STEPS) == 6
        assert all((ROOT / page).parent.joinpath(link).is_file() for link in links), links


def test_links_between_files_of_the_repository_exist():
    """As a reader of the repository follows them; the site has a check of its own."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    files = [file for file in files if not file.is_relative_to(ROOT / "docs" / "site")]
    # Sources of the pages of members, whose links are those of the site.
    files = [file for file in files if not file.is_relative_to(ROOT / "docs" / "members")]
    assert len(files) > 60
    broken = []
    for file in files:
        text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
        local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
        broken += [f"{file.relative_to(ROOT)}: {link}" for link in local if not (file.parent / link).exists()]
    assert not broken
