"""What was measured is kept once a machine, whatever happens to the file; pins, records and fixed choices."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forking import start_python
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops import tuning as store
from polyformer.core.ops.tuning import Section, adopted, forget, recorded


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Config):
    """A choice of one number."""

    width: int = 1


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(store.PIN, raising=False)
    forget()
    yield
    Section.sections.pop("tested", None)
    forget()


def section(width: int = 7) -> tuple[Section[Choice], list[int]]:
    """A section, and how many threads each of its measurements had."""
    measured: list[int] = []

    def measure() -> Choice:
        measured.append(torch.get_num_threads())
        return Choice(width=width)

    return Section("tested", Choice(), measure), measured


def test_it_is_measured_once_and_kept_by_threads():
    own, measured = section()
    assert [own().width, own().width] == [7, 7]
    again, more = section(8)
    assert again().width == 7
    assert (measured, more) == ([1], [])
    torch.set_num_threads(2)
    try:
        assert again().width == 8
    finally:
        torch.set_num_threads(1)
    assert set(store.stored()) == {"tested, 1 thread", "tested, 2 threads"}
    assert recorded()["tested, 2 threads"] == {"width": 8}


@pytest.mark.parametrize("choice", ["3", '{"width": "wide"}', '{"high": 1}'])
def test_a_choice_that_cannot_be_understood_is_measured(choice: str):
    store.path().parent.mkdir(parents=True)
    store.path().write_text(f'{{"choices": {{"tested, 1 thread": {choice}}}}}')
    assert section()[0]().width == 7


@pytest.mark.parametrize("content", ["", "{", "[]", '{"choices": 3}', "\0" * 100])
def test_a_damaged_file_counts_as_none(content: str):
    store.path().parent.mkdir(parents=True)
    store.path().write_text(content)
    assert section()[0]().width == 7


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert section()[0]().width == 7
    assert section(8)[0]().width == 8, "the next process measures again"


def test_the_first_of_two_that_measured_is_believed():
    assert store.store_choice("tested, 1 thread", {"width": 3}) == {"width": 3}
    assert store.store_choice("tested, 1 thread", {"width": 4}) == {"width": 3}
    assert section()[0]().width == 3


def test_processes_that_race_for_the_file_agree(tmp_path: Path):
    """Each adds a section of its own and one that all have; none is lost, and all read the same."""
    code = (
        "import sys, json; from polyformer.core.ops import tuning as store\n"
        "me = int(sys.argv[1])\n"
        "mine = [store.store_choice(f'own {me} {i}', {'width': me}) for i in range(10)]\n"
        "print(json.dumps(store.store_choice('shared', {'width': me})))"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path / "race")}
    racing = [start_python("-c", code, i, env=environment) for i in range(4)]
    ended = [program.ended() for program in racing]
    assert len({each.stdout for each in ended}) == 1
    assert all(each.returncode == 0 for each in ended)
    (file,) = (tmp_path / "race").rglob("*.json")
    assert len(json.loads(file.read_text())["choices"]) == 41


def test_a_pin_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store.save(tmp_path / "pin.json", {"tested, 1 thread": {"width": 5}})
    monkeypatch.setenv(store.PIN, str(tmp_path / "pin.json"))
    own, measured = section()
    with adopted({"tested, 1 thread": {"width": 6}}):
        assert own().width == 5
    monkeypatch.setenv(store.PIN, "fixed")
    forget()
    assert own().width == 1
    assert not measured


@pytest.mark.parametrize("pin", ["absent.json", "damaged.json"])
def test_a_pin_that_cannot_be_read_is_an_error(pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "damaged.json").write_text("{")
    monkeypatch.setenv(store.PIN, str(tmp_path / pin))
    with pytest.raises(InputError, match=rf'POLYFORMER_TUNING: expected "fixed" or a file .*{pin}'):
        section()[0]()


def test_what_a_run_was_made_with_comes_before_the_file():
    own, _ = section()
    assert own().width == 7
    with adopted({"tested, 1 thread": {"width": 6}}):
        assert own().width == 6
        assert recorded()["tested, 1 thread"] == {"width": 6}
    assert own().width == 7


def test_deterministic_mode_takes_the_fixed_choice():
    own, measured = section()
    torch.use_deterministic_algorithms(True)
    try:
        assert own().width == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert not measured
    with own.using(Choice(width=9)):
        assert own().width == 9
