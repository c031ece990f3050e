"""The report of a run: one well-formed page that loads nothing and holds the run's numbers."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer import Window, create_model
from polyformer.cli.main import main
from polyformer.cli.plots.report import (
    AttentionMaps,
    attention_view,
    has_causal_attention,
    patterns,
    write_report,
)
from polyformer.cli.plots.report.page import Growth, Scale, Series, bar_chart, line_chart, measure_growth
from polyformer.data.sources import libraries
from polyformer.training.recipes.fit import fit
from polyformer.training.recipes.report import number
from polyformer.training.recipes.run import Run
from tiny_recipes import TEXT, tiny_recipe

VOID = {"meta", "link", "br", "img", "input", "hr"}
GROWTH = [
    Growth("dense", (256, 512), (1.5, 6.25), (32896, 131328)),
    Growth("window", (256, 512), (1, 2), (9, 8)),
]
TINY = ["--steps", "2", "--device", "cpu", "--model.hidden_size", "16", "--model.num_hidden_layers", "2"]


class Page(HTMLParser):
    """What a page holds: its tags must be closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.labels: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag == "svg":
            self.labels.append(values.get("aria-label") or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A much shortened demonstration."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "CHARACTERS", 60_000)
        patch.setattr("polyformer.cli.plots.report.measure_growth", lambda: GROWTH)
        words = ["--task.ngram_order", "2", "--tokenizer.vocab_size", "300", "--training.engine.threads", "1"]
        assert main(["train", "--out", str(folder), *TINY, *words]) == 0
    return Run.open(folder)


def test_the_demonstration_is_the_bare_command_and_ends_with_its_report(
    demo: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = demo
    assert run.recipe.data.path == libraries.LIBRARY
    assert run.recipe.optimizer.kind == "muon"
    assert (run.folder / "report.html").is_file()
    monkeypatch.setattr(libraries, "CHARACTERS", 60_000)
    monkeypatch.setattr("polyformer.cli.plots.report.measure_growth", lambda: GROWTH)
    assert main(["train", "--resume", str(run.folder)]) == 0
    assert capsys.readouterr().out.endswith(f"Report: {run.folder / 'report.html'}\n")


def test_the_page_is_well_formed_alone_and_described(demo: Run):
    run = demo
    text = (run.folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>\n<html lang=")
    assert len(page.ids) == len(set(page.ids)) > 5
    assert page.loaded == []
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(page.labels) >= 3
    for name in re.findall(r'aria-labelledby="([^"]*)"', text):
        assert name in page.ids
    script = (Path(polyformer.__file__).parent / "cli/plots/report/attention.js").read_text()
    assert set(re.findall(r'getElementById\("([^"]*)"\)', script)) <= set(page.ids)


def test_the_page_holds_the_numbers_of_the_run(demo: Run):
    run = demo
    words = "".join(Page((run.folder / "report.html").read_text(encoding="utf-8")).text)
    for metrics in (*run.facts["baselines"].values(), *run.facts["metrics"].values()):
        for value in metrics.values():
            assert number(value) in words
    assert f"{run.facts['parameters']:,}" in words
    assert "2-gram (Kneser-Ney)" in words
    assert "class Stack:" in words


def test_the_curve_marks_the_weights_of_the_table(demo: Run):
    run = demo
    text = (run.folder / "report.html").read_text(encoding="utf-8")
    kept = run.facts["kept"]
    assert kept["step"] == 2
    assert kept["reason"].startswith("kept the last weights (step 2): loss ")
    assert f"The run {kept['reason']}." in "".join(Page(text).text)
    assert "kept: step 2" in text
    assert number(run.facts["metrics"]["validation"]["loss"]) in kept["reason"]


def test_a_model_without_samples_or_maps_has_a_report(tmp_path: Path):
    (tmp_path / "pairs.tsv").write_text(
        "source\ttarget\n" + "".join(f"word {i}\tWort {i}\n" for i in range(20))
    )
    words = ["--task.kind", "translate", "--model", "transformer-tiny", "--tokenizer.algorithm", "bytes"]
    folder = tmp_path / "run"
    assert (
        main(["train", "--data", str(tmp_path / "pairs.tsv"), "--out", str(folder), *words, *TINY[:6]]) == 0
    )
    assert not (folder / "report.html").exists()
    path = write_report(Run.open(folder), tmp_path / "page.html", GROWTH)
    page = Page(path.read_text(encoding="utf-8"))
    assert "attention-data" not in page.ids
    assert "learning" in page.ids


def test_maps_hold_the_weights_and_no_token_ends_the_script():
    weights = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])
    text = attention_view(AttentionMaps(["</script>", "a"], weights))
    (data,) = re.findall(r'id="attention-data">(.*)</script>', text)
    content = json.loads(data)
    assert "</script>" not in data
    assert content["tokens"] == ["</script>", "a"]
    assert list(base64.b64decode(content["weights"])) == [255, 0, 64, 191]


def test_scales_and_ticks():
    scale = Scale(256, 4096, 0, 400, log=True)
    assert [scale(value) for value in scale.ticks()] == pytest.approx([0, 100, 200, 300, 400])
    assert Scale(0.9, 6.2, 0, 1, log=False).ticks() == [2, 4, 6]
    assert Scale(3, 3, 10, 20, log=False)(3) == 10


def test_charts_say_every_value():
    chart = line_chart(
        "a & b", [Series("own", [(1, 2.5), (2, 2)]), Series("other", [(0, 4)], level=True)], "x", "y"
    )
    assert 'aria-label="a &amp; b"' in chart
    assert "<title>own: 2.5 at 1</title>" in chart
    assert "<title>other: 4</title>" in chart
    bars = bar_chart("bars", [("first", 1.0), ("<own>", 0.5)], "{:.2f}".format)
    assert "&lt;own&gt;" in bars
    assert 'class="bar own" x="212" y="42" width="200.0"' in bars


def test_growth_counts_the_scores_that_are_allowed():
    dense, window = measure_growth((16, 200), repeats=1)
    assert dense.scores == (16 * 17 // 2, 200 * 201 // 2)
    assert window.scores == (16 * 17 // 2, 128 * 129 // 2 + 72 * 128)
    assert all(value > 0 for item in (dense, window) for value in item.milliseconds)


@pytest.mark.parametrize(
    ("preset", "options", "stacks", "causal"),
    [
        ("decoder-tiny", {}, ["decoder"], True),
        ("decoder-tiny", {"attention": "retention"}, [], False),
        ("encoder-tiny", {}, [], False),
        ("encoder-tiny", {"attention": Window(2)}, ["encoder"], False),
        ("transformer-tiny", {}, ["decoder"], True),
        ("vit-mini", {}, [], False),
    ],
)
def test_patterns_and_costs_are_those_of_the_model(
    preset: str, options: dict[str, Any], stacks: list[str], causal: bool
):
    model: Any = create_model(preset, **options)
    assert has_causal_attention(model) == causal
    assert re.findall(r"The (\w+), first layer", patterns(model)) == stacks


def test_baselines_stand_in_the_table_of_every_metric(tmp_path: Path):
    (tmp_path / "notes.txt").write_text(TEXT)
    fit(tiny_recipe(tmp_path / "notes.txt", steps=2), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    without = write_report(run, growth=GROWTH).read_text()
    assert 'id="metrics"' in without
    assert "Beside baselines" not in without
    scores = {"perplexity": 7.25, "loss": -0.5}
    run.record(baselines={"a <simple> method": scores})
    words = "".join(Page(text := write_report(run, growth=GROWTH).read_text()).text)
    assert "perplexity; less is better" in words
    assert "a <simple> method" in words
    assert "-0.5" in words
    assert "&lt;simple&gt;" in text
