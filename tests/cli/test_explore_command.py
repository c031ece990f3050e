"""`polyformer explore`, from words to a page and complaints."""

import base64
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from polyformer.cli.commands import inputs
from polyformer.cli.commands.explore import ExploreOptions, text_of
from polyformer.cli.main import main

SMALL = "--model.num_hidden_layers", "2", "--model.hidden_size", "32", "--model.num_attention_heads", "2"


class Scripts(HTMLParser):
    """The content of each element of a page that has an id, and what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[str, str] = {}
        self.references: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.inside = values.get("id") or ""
        self.references += [value for name, value in values.items() if value and name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.contents[self.inside] = self.contents.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def explored(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command and reads the data of its page."""

    def run(*words: str) -> dict[str, Any]:
        assert main(["explore", *words, "--out", "page.html"]) == 0
        assert re.search(r"Written to page.html \(\d+\.\d MB\)", capsys.readouterr().out)
        page = Scripts()
        page.feed(Path("page.html").read_text(encoding="utf-8"))
        assert page.references == []
        header = json.loads(page.contents["explorer-data"])
        header["bytes"] = len(base64.b64decode(page.contents["explorer-buffers"]))
        return header

    return run


def test_a_page_holds_every_layer_of_a_decoder(explored: Callable[..., dict[str, Any]]):
    header = explored("decoder-tiny", "to see is to compute", *SMALL)
    (run,) = header["runs"]
    assert [site["name"] for site in run["sites"]] == [
        "decoder layer 1, self-attention",
        "decoder layer 2, self-attention",
    ]
    assert {site["heads"] for site in run["sites"]} == {2}
    assert {site["detail"]["kind"] for site in run["sites"]} == {"pairs"}
    assert "".join(run["tokens"]["decoder"]).endswith("to see is to compute")
    length = len(run["tokens"]["decoder"])
    assert run["sites"][0]["detail"]["q"]["shape"] == [2, length, 16]
    end = max(site["detail"]["lse"]["at"] + 2 * length * 4 for site in run["sites"])
    assert header["bytes"] >= end
    assert (run["prompt"], run["notes"]) == (None, [])


def test_generated_tokens_are_steps(explored: Callable[..., dict[str, Any]]):
    (run,) = explored("decoder-tiny", "abc", "--generate", "5", *SMALL)["runs"]
    assert len(run["tokens"]["decoder"]) == run["prompt"] + 4  # nothing is asked of the last token
    (run,) = explored("transformer-tiny", "abc", "--generate", "3", *SMALL)["runs"]
    assert run["prompt"] == 1
    assert {site["kind"] for site in run["sites"]} == {"self", "cross"}
    (run,) = explored("transformer-tiny", "abc", "--target", "xy", *SMALL)["runs"]
    assert "".join(run["tokens"]["decoder"]).endswith("xy")


def test_two_texts_and_two_models_stand_beside_each_other(explored: Callable[..., dict[str, Any]]):
    runs = explored("encoder-tiny", "one text", "--against", "another", *SMALL)["runs"]
    assert ["".join(run["tokens"]["encoder"]) for run in runs] == ["one text", "another"]
    assert [run["name"].strip("'\"") for run in runs] == ["one text", "another"]


def test_two_texts_are_read_by_a_model_that_is_loaded_once(monkeypatch: pytest.MonkeyPatch):
    loaded = []

    def counted(name: str, *rest: Any) -> inputs.ModelAndTexts:
        loaded.append(name)
        return load(name, *rest)

    load = inputs.load
    monkeypatch.setattr(inputs, "load", counted)
    assert main(["explore", "encoder-tiny", "one text", "--against", "another", *SMALL]) == 0
    assert loaded == ["encoder-tiny"]


def test_a_small_page_has_thumbnails_and_says_so(explored: Callable[..., dict[str, Any]]):
    (run,) = explored("encoder-tiny", "word " * 10, "--megabytes", "0.001", *SMALL)["runs"]
    assert all(site["detail"] is None and site["thumbnails"] for site in run["sites"])
    assert "2 of 2 layers have thumbnails alone, for a page of at most 0.001 MB" in run["notes"][0]


def test_hostile_text_ends_no_script(explored: Callable[..., dict[str, Any]]):
    hostile = "</script><script>alert(1)</script>\u202e\x07<!-- \U0001f600 e\u0301"
    header = explored("encoder-tiny", hostile, *SMALL)
    assert header["title"].count("<script>") == 1
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.count("<script>alert(1)") == 0
    assert "Content-Security-Policy" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("encoder-tiny",), "text: expected either TEXT or --file FILE"),
        (("encoder-tiny", "  "), "text: expected a text, got only white space"),
        (("encoder-tiny", "--file", "absent.txt"), "--file: absent.txt: cannot be read"),
        (("encoder-tiny", "a", "--generate", "3"), "generate: an encoder cannot generate"),
        (("decoder-tiny", "a", "--target", "b"), "target: only for encoder-decoder models"),
        (("decoder-tiny", "a", "--generate", "0"), "--generate: expected 1 or more, got 0"),
        (("decoder-tiny", "a", "--megabytes", "0"), "--megabytes: expected a number above 0, got 0"),
        (("absent-model", "a"), "absent-model"),
        ((".", "a", "--transformers"), "transformers cannot read it"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explore", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not Path("explorer.html").exists()


def test_a_byte_order_mark_of_a_file_is_no_part_of_the_text(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_bytes("\ufeffa text".encode())
    assert text_of(ExploreOptions(model="encoder-tiny", file=str(file))) == "a text"
