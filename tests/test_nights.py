"""The day and the parts of the nights together run every case of the suite, and no part repeats another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nights import BY_DAY, TESTS, text
from registered import EVERYTHING, nightly


def test_the_table_names_functions_that_exist() -> None:
    for file, functions in BY_DAY.items():
        source = (TESTS / file).read_text()
        assert [name for name in functions if name != "*" and f"def {name}(" not in source] == []


def collected(file: str, **environment: str) -> list[str]:
    """The cases of a file of tests that run in an environment."""
    words = ["-m", "pytest", "--collect-only", "-p", "no:cacheprovider", str(TESTS / file)]
    own = {name: value for name, value in os.environ.items() if name not in ("NIGHT", "DAY", "EVERYTHING")}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=own | environment
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@nightly
def test_day_and_parts_together_are_the_whole(tmp_path: Path) -> None:
    file, day = "contracts/test_k15_speculation.py", str(tmp_path / "day.json")
    collected(file, DAY=day)
    by_day = collected(file)
    whole = collected(file, EVERYTHING="1")
    parts = [collected(file, EVERYTHING="1", NIGHT=f"{k}/3", DAY=day) for k in (1, 2, 3)]
    at_night = [case for part in parts for case in part]
    assert len(set(at_night)) == len(at_night)
    assert 0 < len(by_day) < len(whole)
    assert {*by_day, *at_night} == {*whole}
    assert all(parts)


@pytest.mark.parametrize("value", [(lambda: 0), [object()], {"a": 10**5000}, [[[[[]]]]], print], ids=range(5))
def test_the_text_of_a_value_has_no_address(value: object) -> None:
    assert "0x7f" not in text(value)


def test_by_day_a_member_has_one_example() -> None:
    from polyformer.attention.patterns import Window
    from registered import examples

    assert (len(examples(Window)) > 1) == EVERYTHING
