"""Experiments of one's own: real runs, in processes, killed and resumed."""

import itertools
import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from forking import run_python, start_python
from polyformer import InputError
from polyformer.cli.main import main
from polyformer.models.plugins import IMPORTED_NAMES
from polyformer_lab import processes
from polyformer_lab.cells import MEASURES, cells_of, ordered
from polyformer_lab.machine import Sources
from polyformer_lab.results import read_csv
from polyformer_lab.study import Study
from registered import EVERYTHING

MINE = """
claim: a wider model learns more
base:
  task: {kind: lm, row_length: 16, batch_tokens: 64}
  model: {preset: decoder-tiny, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}
  data: {path: mine.txt}
  tokenizer: {algorithm: bytes}
  training: {steps: 4, saving: {checkpoint_every: 1}}
grid:
  width: {8: {model.hidden_size: 8}, 16: {model.hidden_size: 16}}
  block: {pre: {}, post: {model.block: post}}
seeds: [0, 1]
define: {gain: "validation.loss[8, pre] - validation.loss[16, pre]"}
holds: [gain > -10, "mean(parameters[16, pre]) > mean(parameters[8, pre])"]
metrics: [validation.loss]
plot: {x: width, y: validation.loss}
"""
SMALL = ["--training.steps", "1"]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text("a few words to read and to write again\n" * 200)
    Path("mine.yaml").write_text(MINE)
    return tmp_path


def changed(**changes: object) -> str:
    text = yaml.safe_dump({**yaml.safe_load(MINE), **changes}, sort_keys=False)
    Path("mine.yaml").write_text(text)
    return text


def figures(out: Path) -> dict[str, float]:
    """The validation losses by folder of the cell."""
    files = out.glob("*/rows.json")
    return {file.parent.name: json.loads(file.read_text())["rows"][0]["validation.loss"] for file in files}


def test_an_experiment_writes_table_curve_verdict_and_page(mine: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "mine.yaml", "--out", "out"]) == 0
    text = capsys.readouterr().out
    assert "a wider model learns more: supported (gain " in text
    assert len(figures(mine / "out")) == 8
    record = json.loads(Path("out/claim.json").read_text())
    assert record["verdicts"]["mine"]["outcome"] == "supported"
    for figure in ("mine", "mine-validation"):
        assert Path(f"out/{figure}.png").read_bytes().startswith(b"\x89PNG")
    results = read_csv(Study.load("mine.yaml"), Path("out/mine.csv"))
    assert results.lookup("validation.loss", (8, "pre")).shape == (2,)
    page = Path("out/claims.html").read_text()
    assert "mean ± standard error (range) over 2 seeds" in page
    band = "mean over 2 seeds; band: mean ± one standard error of the mean over the seeds"
    assert f"mine-validation.png: validation loss by step: {band}" in page
    assert f"mine.png: validation.loss by width: {band}" in page
    assert "two seeds cannot reach 0.05 with a sign-flip test" in page
    assert "two seeds cannot reach 0.05 with a sign-flip test" in text
    assert "reproduced" not in page + text, "there is nothing to reproduce"
    differences = Path("out/mine-differences.csv").read_text().splitlines()
    assert differences[0].startswith("axis,label,against,at,metric,difference,")
    assert [line.split(",")[:5] for line in differences[1:]] == [
        [axis, label, first, at, "validation.loss"]
        for axis, label, first, places in (("width", "16", "8", "pre post"), ("block", "post", "pre", "8 16"))
        for at in places.split()
    ]
    assert "://" not in page.replace("http://www.w3.org/2000/svg", ""), "it needs no network"
    assert main(["reproduce", "mine.yaml", "--out", "out", "--seeds", "1", "2"]) == 0, "one seed is there"
    assert "--out" in (changed(seeds=[0]) and _refused(capsys, "--training.steps", "5"))


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["reproduce", "mine.yaml", "--out", "out", *words]) == 2
    return capsys.readouterr().err


def test_what_is_killed_goes_on_with_the_rest(mine: Path):
    """The rest in this process, for time, as the whole that it is compared with."""
    command = ["reproduce", "mine.yaml", "--out"]
    assert main([*command, "whole"]) == 0
    running = start_python("-m", "polyformer", *command, "killed", "--jobs", "2", cwd=mine)
    while len(figures(mine / "killed")) < 2 and running.poll() is None:
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    assert running.ended().returncode == -signal.SIGKILL
    time.sleep(1)  # the cells notice that their parent is gone
    kept = {file: file.stat().st_mtime_ns for file in (mine / "killed").glob("*/rows.json")}
    assert 2 <= len(kept) < 8
    assert main([*command, "killed"]) == 0
    assert all(file.stat().st_mtime_ns == changed for file, changed in kept.items())
    assert figures(mine / "killed") == pytest.approx(figures(mine / "whole"), rel=1e-6)


def test_a_cell_that_fails_stops_no_other(mine: Path, capsys: pytest.CaptureFixture[str]):
    grid = {"block": {"pre": {}, "wrong": {"data.path": "absent.txt"}}}
    shown = {"define": {"loss": "validation.loss[pre]"}, "holds": ["loss < 10"], "plot": None}
    changed(grid=grid, seeds=[0], **shown)
    assert main(["reproduce", "mine.yaml", "--out", "out", "--jobs", "1"]) == 1
    text = capsys.readouterr().out
    assert "mine, pre, seed 0: done" in text
    assert "absent.txt" in text
    assert "failed: mine, wrong, seed 0; run the same command again to resume them" in text
    assert "log.txt" in Path("out/claims.html").read_text()
    shutil.rmtree("out")
    assert main(["reproduce", "mine.yaml", "--out", "out"]) == 2, "in this process at once"


def test_a_cell_ends_with_its_parent(mine: Path):
    (cell, *_) = cells_of(
        Study.load("mine.yaml").changed({"training.steps": 10**6}), mine, Sources({}, None, {})
    )
    values = {"labels": cell.labels, "seed": 0, "folder": str(cell.folder), "recipe": cell.recipe}
    order = {**values, "kind": cell.kind, "options": {}, "imports": []}
    ended = run_python("-m", processes.__name__, input=json.dumps(order) + "\n", timeout=300)
    assert ended.returncode == processes.ORPHANED
    assert cell.rows() is None


def test_cells_come_after_those_that_they_name(mine: Path):
    changed(
        grid={
            "of": {"student": {"model.pretrained": "$cell(teacher)"}, "teacher": {}},
            "size": {1: {}, 2: {}},
        }
    )
    cells = cells_of(Study.load("mine.yaml"), mine, Sources({}, None, {}))
    first, second = ordered(cells)
    assert {cell.labels[0] for cell in first} == {"teacher"}
    for cell in second:
        assert cell.recipe is not None
        (teacher,) = cell.needs
        assert cell.recipe["model"]["pretrained"] == str(teacher.folder)
        assert (teacher.labels[1], teacher.seed) == (cell.labels[1], cell.seed)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"gird": {}}, (), "unknown option of Study 'gird': did you mean 'grid'"),
        ({"grid": {"a": []}}, (), "grid.a: expected labels with their changes"),
        ({"grid": {"a": {"b": 5}}}, (), "grid.a.b: expected settings by their dotted names"),
        ({"grid": {"a": {"b": {5: 1}}}}, (), "grid.a.b: expected settings by their dotted names"),
        ({"grid": {"a": {"b": ["model.block"]}}}, (), "grid.a.b: expected settings by their dotted names"),
        ({"quick": {"grid": 5}}, ("--quick",), "grid: expected a mapping, got 5"),
        ({"quick": {"seeds": 5}}, ("--quick",), "seeds: expected a list, got 5"),
        (
            {"grid": {axis: {label: {} for label in range(100)} for axis in "abcd"}},
            (),
            "grid: expected at most 16,384 runs, got 100,000,000",
        ),
        ({"seeds": [*range(9000)]}, (), "grid: expected at most 16,384 runs, got 36,000"),
        ({"name": "../../mine"}, (), "name: expected the name of a file without its folder"),
        ({"measure": {"of": 1}}, (), "measure: expected a mapping with the name of its kind"),
        ({"measure": {"kind": ["scores"]}}, (), "measure: expected a mapping with the name of its kind"),
        ({"prepare": {"of": 1}}, (), "prepare: expected a mapping with the name of its kind"),
        ({"grid": {"a": {"b": {"measure": 5}}}}, (), "measure: expected a mapping, got 5"),
        ({"grid": {"a": {"b": {"measure.kind": {"a": 1}}}}}, (), "unknown measurement {"),
        ({"measure": {"kind": "ensemble"}}, (), "ensemble: expected the option 'runs'"),
        ({"measure": {"kind": "ensemble", "runs": "x"}}, (), "ensemble.runs: expected a list, got 'x'"),
        ({"measure": {"kind": "images", "pixels": []}}, (), "images.pixels: expected int, got []"),
        ({"grid": {"a": {"generate": []}}}, (), "unknown axis []"),
        ({"base": {"recipe": 5}}, (), "base.recipe: expected str, got 5"),
        ({"holds": ["1 +"]}, (), "expected an expression"),
        (
            {"needs": {"wikitext2": "yes"}},
            (),
            "needs.wikitext2: expected 'required' or 'optional', got 'yes'",
        ),
        (
            {"needs": {"wikitext": "optional"}},
            (),
            "unknown source in needs 'wikitext': did you mean 'wikitext2'",
        ),
        ({"grid": {"a": {"b": {}, "c": {"model.blck": "pre"}}}}, (), "unknown option of ModelConfig 'blck'"),
        ({"measure": {"kind": "scored"}}, (), "unknown measurement 'scored': did you mean 'scores'"),
        ({"measure": {"kind": "scores", "of": 1}}, (), "unknown option of scores 'of'"),
        (
            {"holds": ["validation.los[8, pre] > 1"], "define": {}},
            (),
            "'validation.los[8, pre] > 1': unknown metric or name 'validation.los': did you mean 'valid",
        ),
        ({"holds": ["gian > 1"]}, (), "'gian > 1': unknown name 'gian': did you mean 'gain'? A metric has"),
        ({"holds": ["seconds[8, pr] > 1"]}, (), "unknown label of block 'pr': did you mean 'pre'?"),
        ({"holds": ["seconds[32:, pre] > 1"]}, (), "no label of width lies within 32:"),
        ({"holds": ["seconds[8] > 1"]}, (), "seconds has 1 labels; expected those of width, block"),
        ({"metrics": ["validation.perplexty"]}, (), "metrics: unknown metric or name 'validation.perpl"),
        (
            {"plot": {"x": "widht", "y": "seconds"}},
            (),
            "plot: unknown axis or metric 'widht': did you mean 'width'",
        ),
        (
            {"grid": {"a": {"b": {"model.pretrained": "$cell(c)"}}}},
            (),
            "no axis of the grid has such a label",
        ),
        (
            {"grid": {"a": {"b": {"model.pretrained": "$cell(b)"}}}},
            (),
            "refers to a cell that refers to it",
        ),
        ({"grid": {"a": {"b c": {}, "b-c": {}}}}, (), "'b c, seed 0' and 'b-c, seed 0' name the same folder"),
        ({}, ("--book", "absent.txt"), "--book: mine does not read it"),
        ({}, ("--jobs", "0"), "--jobs: expected 1 or more, got 0"),
        ({}, ("--data", "absent"), "--data: no such file or folder: absent"),
        ({}, ("--trainig.steps", "1"), "unknown option of Recipe 'trainig': did you mean 'training'"),
    ],
)
def test_a_study_with_unknown_settings_is_refused_in_a_line(
    mine: Path,
    complaint: Callable[..., str],
    changes: dict[str, object],
    words: tuple[str, ...],
    message: str,
):
    rule = {"define": {}, "holds": [], "plot": None} if "grid" in changes else {}
    changed(**{"seeds": [0], **rule, **changes})
    assert message in complaint("reproduce", "mine.yaml", "--out", "out", *words)
    assert not [*Path().glob("**/recipe.yaml")], "nothing was trained"


@pytest.mark.parametrize("place", ["base", "recipe", "grid"])
def test_an_experiment_imports_only_what_the_command_line_names(
    mine: Path, place: str, complaint: Callable[..., str]
):
    module = f"own_parts_{place}"
    Path(f"{module}.py").write_text("open('evidence', 'w').close()")
    own = {"imports": [f"{module}.py"]}
    base, grid = yaml.safe_load(MINE)["base"], {"width": {8: {}}}
    Path("recipe.yaml").write_text(yaml.safe_dump({**base, **(own if place == "recipe" else {})}))
    base = {"recipe": "recipe.yaml"} if place == "recipe" else base | (own if place == "base" else {})
    changed(base=base, grid={"width": {8: own}} if place == "grid" else grid, seeds=[0], define={}, holds=[])
    error = complaint("reproduce", "mine.yaml", "--out", "out")
    assert f"'{module}.py' is code" in error
    assert f"add --import {module}.py to the command" in error
    assert not Path("evidence").exists()
    assert main(["reproduce", "mine.yaml", "--out", "out", "--import", f"{module}.py", *SMALL]) == 0
    assert Path("evidence").exists()
    IMPORTED_NAMES.clear()


def test_nothing_is_written_outside_of_the_folder(mine: Path):
    changed(grid={"width": {"..": {}}}, seeds=[])
    (cell,) = cells_of(Study.load("mine.yaml"), mine / "out", Sources({}, None, {}))
    assert cell.folder.resolve().parent == mine / "out"


def test_rules_are_checked_before_the_first_run(mine: Path, complaint: Callable[..., str]):
    changed(holds=["meen(gain) > 0"])
    assert "did you mean 'mean'" in complaint("reproduce", "mine.yaml", "--out", "out")
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "content",
    [{"rows": 5}, {"rows": [5]}, {"rows": [{"a": [1]}]}, {}, {"rows": [], "facts": 5}, {"rows": [{}]}],
)
def test_damaged_rows_are_named(mine: Path, content: dict[str, object]):
    cell = cells_of(Study.load("mine.yaml"), mine, Sources({}, None, {}))[0]
    cell.folder.mkdir()
    (cell.folder / "rows.json").write_text(json.dumps({"settings": cell.settings, **content}))
    with pytest.raises(InputError, match=r"rows\.json is damaged: it has no rows of figures; remove it"):
        cell.run()


def test_a_curve_over_labels_that_are_no_numbers(mine: Path, complaint: Callable[..., str]):
    changed(grid={"block": {"pre": {}}}, seeds=[0], define={}, holds=[], plot={"x": "block", "y": "seconds"})
    assert "plot: expected numbers in block" in complaint("reproduce", "mine.yaml", "--out", "out", *SMALL)


def test_an_experiment_is_printed_as_it_would_run(mine: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["reproduce", "mine.yaml", "--print", "--training.steps", "7", "--seeds", "5"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["base"]["training"]["steps"] == 7
    assert printed["seeds"] == [5]
    assert Study.from_dict(printed) == Study.load("mine.yaml").changed({"training.steps": 7, "seeds": [5]})


def test_sources_are_found_and_named(tmp_path: Path):
    (tmp_path / "sst2").mkdir()
    (tmp_path / "book.txt.gz").write_bytes(b"")
    needs = {"sst2": "required", "imdb": "required", "book": "optional"}
    sources = Sources(needs, str(tmp_path), {"imdb": str(tmp_path / "sst2")})
    assert {name: Path(path).name for name, path in sources.places.items()} == {
        "sst2": "sst2",
        "imdb": "sst2",
        "book": "book.txt.gz",
    }
    assert Sources({"book": "optional"}, None, {}).fill("$book") is None
    assert Sources(needs, None, {}).lacks.startswith("sst2 (SST-2: a directory")
    assert Sources({"book": "required"}, str(tmp_path / "sst2"), {}).places["book"].endswith("sst2")
    with pytest.raises(InputError, match="sst2: no such file or folder: absent"):
        Sources(needs, None, {"sst2": "absent"})


def blocks(kind: str) -> list[str]:
    """The blocks of a kind on the page about experiments."""
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def test_the_page_on_experiments_is_right(mine: Path, capsys: pytest.CaptureFixture[str]):
    study, _ = blocks("yaml")
    (code,) = blocks("python")
    assert len(study.splitlines()) <= 20
    Path("attentions.yaml").write_text(study)
    sizes = ["--training.steps", "2", "--model.hidden_size", "16", "--model.num_attention_heads", "2"]
    assert main(["reproduce", "attentions.yaml", "--seeds", "0", *sizes]) == 0
    assert "a window of 64 tokens is as good as dense attention: " in capsys.readouterr().out
    assert Path("runs/attentions/attentions.png").is_file()
    Path("functions.py").write_text(code)
    own = {name: yaml.safe_load(study)[name] for name in ("base", "grid")}
    measure = {"kind": "seconds-by-length", "lengths": [8, 16]}
    Path("measured.yaml").write_text(yaml.safe_dump({**own, "measure": measure}))
    try:
        assert main(["reproduce", "measured.yaml", "--import", "functions.py", *sizes]) == 0
    finally:
        MEASURES.pop("seconds-by-length", None)
    assert re.search(r"window +16 +0\.\d+", capsys.readouterr().out)


def table_of(text: str, first: str) -> list[list[str]]:
    """The cells of the table whose header starts with a word, up to an empty line or a sentence."""
    lines = text[text.index(f"{first} ") :].splitlines()
    rows = itertools.takewhile(lambda line: line and not line.startswith("Differences"), lines)
    return [re.split(r"  +", line.strip()) for line in rows]


def test_the_grid_of_rates_on_the_page_gives_the_tables_of_the_page(
    mine: Path, capsys: pytest.CaptureFixture[str]
):
    """By day on a small text, with the labels of both tables; at night as on the page, with the means."""
    _, study = blocks("yaml")
    (page,) = blocks("text")
    Path("rates.yaml").write_text(study)
    small = ["--training.steps", "1", "--seeds", "0", "1", "--data.path", "mine.txt"]
    assert main(["reproduce", "rates.yaml", *([] if EVERYTHING else small)]) == 0
    text = capsys.readouterr().out
    for first, labels in (("attention", 2), ("axis", 5)):
        own, expected = table_of(text, first), table_of(page, first)
        assert own[0] == expected[0]
        assert [row[:labels] for row in own] == [row[:labels] for row in expected]
    assert "learns as much as dense attention: " in text
    if EVERYTHING:
        assert "dense attention: supported" in text
        means = [
            [float(row[2].split()[0]) for row in table_of(each, "attention")[1:]] for each in (text, page)
        ]
        assert means[0] == pytest.approx(means[1], rel=0.01)


def test_a_study_that_cannot_be_prepared_stops_no_other(mine: Path, capsys: pytest.CaptureFixture[str]):
    Path("book.txt").write_text("a book of one line")
    words = ["--only", "compressive", "short-segments", "--quick", "--book", "book.txt", "--jobs", "2"]
    assert main(["reproduce", "all", *words, "--out", "out"]) == 1
    text = capsys.readouterr().out
    assert "compressive: not run; " in text
    assert "too short a book" in text
    assert "short-segments, segments, seed 0: done" in text
    assert "failed: compressive; run the same command again to resume them" in text
    page = Path("out/claims.html").read_text()
    assert page.count("too short a book") == 2, "in the table of all claims and in the part of this claim"


def test_a_rule_over_a_cell_that_is_not_there_says_so(mine: Path, capsys: pytest.CaptureFixture[str]):
    changed(
        grid={"block": {"pre": {}, "before": {}}},
        quick={"grid": {"block": {"pre": {}}}},
        seeds=[0],
        define={},
        holds=["validation.loss[before] < 1"],
        plot=None,
    )
    assert main(["reproduce", "mine.yaml", "--quick", "--training.steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "a wider model learns more: no verdict, validation.loss[before] was not measured" in text
    assert Path("runs/mine-quick/claim.json").is_file()
