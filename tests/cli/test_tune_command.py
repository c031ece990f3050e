"""`polyformer tune`: measured, kept, shown, written for another machine; bad words are one line."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyformer.cli.main import main
from polyformer.core.ops import tuning as store
from polyformer.core.ops.tuning import Section, forget


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(store.PIN, raising=False)
    forget()
    yield
    forget()


def test_it_measures_keeps_shows_and_pins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["tune", "--show"]) == 0
    assert "none: " in capsys.readouterr().out
    assert main(["tune", "--threads", "1", "--out", str(tmp_path / "own.json")]) == 0
    measured = capsys.readouterr().out
    assert set(store.stored()) == {f"{name}, 1 thread" for name in Section.sections}
    assert json.loads((tmp_path / "own.json").read_text())["choices"] == store.stored()
    assert main(["tune", "--show"]) == 0
    assert capsys.readouterr().out == measured
    monkeypatch.setenv(store.PIN, str(tmp_path / "own.json"))
    assert main(["tune", "--show"]) == 0
    assert f"choices: POLYFORMER_TUNING={tmp_path / 'own.json'}" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(Section, "sections", {"batched products": Section.sections["batched products"]})
    assert main(["tune", "--threads", "1"]) == 0
    assert "not saved: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--threads", "0"], ["--show", "--out", "x"], ["--show", "--threads", "2"]]
)
def test_bad_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["tune", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_bad_pin_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(store.PIN, "nowhere.json")
    assert main(["tune", "--show"]) == 2
    assert capsys.readouterr().err.startswith(
        'polyformer: error: POLYFORMER_TUNING: expected "fixed" or a file'
    )
