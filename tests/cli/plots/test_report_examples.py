"""The examples of a report, after a real tiny training run of each kind of task, in the words of its data."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from test_run_report import GROWTH
from test_run_report import Page as Parsed

from polyformer.cli.plots.report import write_report
from polyformer.cli.plots.report.examples import LONG, MOST, PLACES, excerpts, tagged_words, text_cell
from polyformer.cli.plots.report.mistakes import GENERATED, SHOWN, ranked
from polyformer.training.recipes.fit import fit
from polyformer.training.recipes.recipe import Recipe
from polyformer.training.recipes.run import Run

HOSTILE = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\u202e</td></table>"
ENCODER = {"preset": "encoder-tiny", "hidden_size": 16, "num_hidden_layers": 1}
DECODER = {"preset": "decoder-tiny", "hidden_size": 16, "num_hidden_layers": 1}
BOTH = {"preset": "transformer-tiny", "hidden_size": 16, "num_hidden_layers": 1}


def trained(folder: Path, rows: list[dict[str, Any]], model: dict[str, Any], **task: Any) -> str:
    """The report of a run of two steps on `rows`, the last five of them for validation."""
    for name, part in (("train", rows[:-5]), ("validation", rows[-5:])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    training = {"steps": 2, "engine": {"device": "cpu", "threads": 1}}
    data = {"path": str(folder / "train.jsonl"), "validation": str(folder / "validation.jsonl")}
    parts = {"task": task, "model": model, "data": data, "training": training}
    fit(Recipe.from_dict({**parts, "tokenizer": {"algorithm": "bytes"}}), folder / "run")
    return write_report(Run.open(folder / "run"), folder / "page.html", GROWTH).read_text(encoding="utf-8")


def words_of(page: str) -> str:
    parsed = Parsed(page)
    assert "examples" in parsed.ids
    assert "<script>window" not in page
    assert "<img src=x" not in page
    return "".join(parsed.text)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that translates, and of its page."""
    folder = tmp_path_factory.mktemp("translator")
    rows = [{"source": f"<b>{i}", "target": f"Wort {i} {HOSTILE}"} for i in range(12)]
    trained(folder, rows, BOTH, kind="translate", beam={"num_beams": 1})
    return folder


def test_translations_stand_beside_their_references_with_a_score(translator: Path):
    page = (translator / "page.html").read_text(encoding="utf-8")
    words = words_of(page)
    run = Run.open(translator / "run")
    bleu = run.facts["metrics"]["validation"]["bleu"]
    assert f"Corpus: bleu {bleu:.4g} (all validation rows, from run.json)" in words
    assert "sentence BLEU" in words
    for i in range(7, 12):
        assert f"<b>{i}" in words
        assert f"Wort {i} " in words
    assert "Wort 6" not in words  # of the training rows
    assert write_report(run, translator / "again.html", GROWTH).read_text(encoding="utf-8") == page


def test_summaries_have_rouge(tmp_path: Path):
    pytest.importorskip("rouge_score")
    rows = [{"source": f"Text {i}. {HOSTILE}", "target": f"Short {i}."} for i in range(12)]
    words = words_of(trained(tmp_path, rows, BOTH, kind="summarize", beam={"num_beams": 1}, max_summary=12))
    assert re.search(r"Corpus: rouge1 [\d.]+, rouge2 [\d.]+, rougeL [\d.]+ \(all validation rows", words)
    assert "Short 11." in words


def test_extracts_have_rouge(tmp_path: Path):
    pytest.importorskip("rouge_score")
    rows = [{"source": f"First {i}. {HOSTILE} It ends.", "target": f"First {i}."} for i in range(12)]
    words = words_of(trained(tmp_path, rows, ENCODER, kind="extract", sentences=1))
    assert "Corpus: rouge1" in words
    assert "First 11." in words


def test_a_mixture_has_a_table_for_each_of_its_tasks(tmp_path: Path):
    parts: dict[str, Any] = {}
    for form in ("translate", "classify"):
        for split in ("train", "valid"):
            rows = [{"source": f"{form} {i} {HOSTILE}", "target": f"{form[0]}{i % 2}"} for i in range(6)]
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (tmp_path / f"{form}-{split}.jsonl").write_text(text)
        data = {"path": f"{form}-train.jsonl", "validation": f"{form}-valid.jsonl"}
        parts[f"{form} <b>"] = {"form": form, "data": data}
    recipe: dict[str, Any] = {
        "task": {"kind": "text_to_text", "folder": str(tmp_path), "parts": parts, "max_target": 8},
        "model": BOTH,
        "tokenizer": {"algorithm": "bytes"},
        "training": {"steps": 1, "engine": {"device": "cpu", "threads": 1}},
    }
    fit(Recipe.from_dict(recipe), tmp_path / "run")
    page = write_report(Run.open(tmp_path / "run"), tmp_path / "page.html", GROWTH).read_text()
    words = words_of(page)
    assert page.count('<table class="examples">') == 2
    assert "sentence BLEU" in words
    assert "exact match" in words
    assert "<h3>classify &lt;b&gt;</h3>" in page


def test_the_most_certain_mistakes_of_a_classifier_come_first(tmp_path: Path):
    rows = [{"text": f"text {i} {HOSTILE}", "label": "<i>good" if i % 2 else "bad"} for i in range(15)]
    page = trained(tmp_path, rows, ENCODER, kind="classify")
    words = words_of(page)
    assert '<table class="confusion">' in page
    assert "Of 5 rows of the validation data" in words
    shown = re.findall(r"<summary>(?:bad|&lt;i&gt;good) \([\d.]+\), taken for \S+ \(([\d.]+)\): text", page)
    assert shown == sorted(shown, reverse=True)
    assert len(shown) == int(re.findall(r"data, (\d) are labelled wrong", words)[0])


def test_words_are_coloured_by_their_tags(tmp_path: Path):
    rows = [{"tokens": ["Anna", "in", HOSTILE], "tags": ["B-PER", "O", "B-LOC"]} for _ in range(15)]
    page = trained(tmp_path, rows, ENCODER, kind="tag")
    assert "share of right tags" in words_of(page)
    assert page.count('<td class="tagged"') == 5
    tagged = tagged_words(["a", "b", "c", "<d>"], ["O", "B-X", "B-X", "O"], ["O", "B-X", "O", "B-<Y>"])
    assert tagged == (
        '<bdi>a</bdi> <span class="right"><bdi>b</bdi><small>B-X</small></span> '
        '<span class="wrong"><bdi>c</bdi><small>O ≠ B-X</small></span> '
        '<span class="wrong"><bdi>&lt;d&gt;</bdi><small>B-&lt;Y&gt; ≠ O</small></span>'
    )


def test_questions_have_answers_and_predictions(tmp_path: Path):
    answers = {"text": ["blue"], "answer_start": [7]}
    rows = [
        {"question": f"What {i}? {HOSTILE}", "context": f"It was blue. {HOSTILE}", "answers": answers}
        for i in range(12)
    ]
    words = words_of(trained(tmp_path, rows, ENCODER, kind="qa"))
    f1 = Run.open(tmp_path / "run").facts["metrics"]["validation"]["f1"]
    assert f"f1 {f1:.4g}" in words
    assert "What 11?" in words
    assert "What 6?" not in words


def test_choices_have_probabilities(tmp_path: Path):
    rows = [{"text": f"Ask {i}", "choices": ["one", HOSTILE, "two"], "label": i % 3} for i in range(12)]
    page = trained(tmp_path, rows, ENCODER, kind="choose")
    words = words_of(page)
    assert "Ask 11" in words
    assert len(re.findall(r"\(0\.\d\d(?:, right)?(?:, chosen)?\)", words)) == 15
    assert len(re.findall(r", right(?:, chosen)?\)", words)) == 5


def test_numbers_stand_beside_the_predicted_ones(tmp_path: Path):
    pytest.importorskip("scipy")
    rows = [{"text": f"one {i}", "pair": HOSTILE, "label": i + 0.5} for i in range(12)]
    words = words_of(trained(tmp_path, rows, ENCODER, kind="regress_pair"))
    assert "closeness to the right number" in words
    assert [f"{i}.5" in words for i in range(5, 12)] == [False] * 2 + [True] * 5
    assert words.index("7.5") < words.index("11.5")


def test_a_language_model_continues_validation_texts(tmp_path: Path):
    rows = [{"text": f"line {i} {HOSTILE} of a text"} for i in range(12)]
    page = trained(tmp_path, rows, DECODER, kind="lm", row_length=64, batch_tokens=128, prompt="line")
    words = words_of(page)
    assert f"{PLACES} evenly spaced places of the validation data" in words
    assert page.count("The text itself continues:") == PLACES
    assert "line 7 " in words
    assert "Cost of attention" in words


def test_excerpts_are_evenly_spaced():
    assert excerpts([], 4) == []
    assert excerpts([[1]], 4) == []
    long = excerpts([range(90)], 10)
    assert [part[0] for part in long] == [0, 30, 60]
    short = excerpts([range(i, i + 5) for i in (0, 100, 200)], 10)
    assert [part[0] for part in short] == [0, 100, 200]


def test_images_that_a_model_of_pixels_completes(tmp_path: Path):
    from PIL import Image

    images = tmp_path / "images"
    images.mkdir()
    for i in range(10):
        Image.new("L", (4, 4), 20 * i).save(images / f"{i}.png")
    recipe: dict[str, Any] = {
        "task": {"kind": "image", "levels": 4, "batch_tokens": 64},
        "model": DECODER,
        "data": {"path": str(images), "validation_fraction": 0.3},
        "training": {"steps": 1, "engine": {"device": "cpu", "threads": 1}},
    }
    fit(Recipe.from_dict(recipe), tmp_path / "run")
    page = write_report(Run.open(tmp_path / "run"), tmp_path / "page.html", GROWTH).read_text()
    assert "real, half, completed" in words_of(page)
    shown = {name: len(re.findall(rf'alt="{name} \d"', page)) for name in ("real", "half", "completed")}
    assert len({*shown.values()}) == 1
    assert shown["real"] > 0


def test_no_row_of_a_report_is_executed(translator: Path, opened: Callable[..., Page]):
    tab = opened(translator / "page.html")
    assert tab.evaluate("window.ran") is None
    assert "<script>window.ran = 1</script>" in tab.locator("table.examples").inner_text()
    assert tab.locator("table.examples tbody td").count() == 4 * 5


def test_examples_are_the_best_the_middle_and_the_worst():
    few = ranked([1.0, 3.0, 1.0, 2.0])
    assert [*few.values()] == [[1, 3, 0, 2]]
    scores = [float(i % 50) for i in range(GENERATED)]
    groups = ranked(scores)
    assert groups["Best"] == [49, 99, 48, 98]
    assert groups["Worst"] == [1, 51, 0, 50]
    assert [scores[i] for i in groups["Typical"]] == [25, 25, 24, 24]
    assert all(len(numbers) == SHOWN for numbers in groups.values())


def test_long_texts_are_opened_and_cut():
    assert text_cell("<a>") == '<td dir="auto">&lt;a&gt;</td>'
    cell = text_cell("a" * LONG + "<b>" + "c" * MOST)
    assert "&lt;b&gt;" in cell
    assert "<details>" in cell
    assert cell.count("c") < MOST
    assert cell.endswith("…</details></td>")
