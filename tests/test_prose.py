"""The measure of plain English finds what it is meant to find."""

from pathlib import Path

import pytest

import prose

SOURCE = '''
class Mask:
    """What hides keys, one a token; those of the past stand alone."""  # beside it

    def rows(self):
        """Return the rows."""
'''


def test_unusual_turns_and_fragments_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mask.py"
    file.write_text(SOURCE)
    assert not prose.measure(file, show=True)
    printed = capsys.readouterr().out
    assert [word for word in ("those of", "alone", "beside") if f": {word}: " not in printed] == []
    assert f"{file}:3: What hides keys" in printed
    assert "50.0 % fragments" in printed


def test_plain_pages_pass_and_code_blocks_do_not_count(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("The mask hides keys.\n```text\nalone beside whose\n```\n| alone | beside |\n")
    assert prose.measure(page, show=False)
    page.write_text("The mask, whose rows stand alone.\n")
    assert not prose.measure(page, show=False)


def test_repeated_classes_of_a_package_are_found(tmp_path: Path):
    for name in ("a/x.py", "a/y.py", "b/x.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("class Options: ...\n")
    (repeated,) = prose.repeated_classes(tmp_path)
    assert "a/y.py: class Options is also in" in repeated
