"""Grids as a researcher writes them: values of a setting in a list, and labels as they are written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyformer import InputError
from polyformer.training.optimizers import SGD, AdamW
from polyformer.training.recipes import Recipe
from polyformer_lab.cells import Cell, cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.processes import THREADS, threads_of_each
from polyformer_lab.results import Results, read_csv, write_csv
from polyformer_lab.study import Study

RATES = """
base:
  task: {kind: lm, row_length: 16, batch_tokens: 64}
  model: {preset: decoder-tiny, num_hidden_layers: 1, hidden_size: 8, num_attention_heads: 2}
grid:
  optimizer.lr: [1e-3, 3e-3, 1.0e-2]
seeds: [0, 1]
"""


@pytest.fixture
def cells(tmp_path: Path) -> Callable[[str], list[Cell]]:
    def made(text: str) -> list[Cell]:
        file = tmp_path / "rates.yaml"
        file.write_text(text)
        return cells_of(Study.load(str(file)), tmp_path / "out", Sources({}, None, {}))

    return made


def optimizers(cells: list[Cell]) -> list[Any]:
    return [Recipe.from_dict(cell.recipe).optimizer for cell in cells if cell.seed in (None, 0)]


def test_a_list_of_rates_needs_no_kind_and_keeps_its_labels(cells: Callable[[str], list[Cell]]):
    own = cells(RATES)
    assert [cell.labels for cell in own[:3]] == [("1e-3",), ("3e-3",), ("1.0e-2",)]
    assert optimizers(own) == [AdamW(lr=1e-3), AdamW(lr=3e-3), AdamW(lr=1e-2)]
    assert own[1].folder.name == "3e-3-0"


@pytest.mark.parametrize("optimizer", ["sgd", "{kind: sgd}", "sgd(momentum=0.9)"])
def test_a_list_of_rates_keeps_the_optimizer_of_the_base(cells: Callable[[str], list[Cell]], optimizer: str):
    own = cells(RATES.replace("base:\n", f"base:\n  optimizer: {optimizer}\n"))
    assert optimizers(own) == [SGD(lr=1e-3), SGD(lr=3e-3), SGD(lr=1e-2)]


def test_rates_do_not_get_lost_before_an_axis_of_optimizers(cells: Callable[[str], list[Cell]]):
    own = cells(
        RATES.replace("seeds", "  by: {sgd: {optimizer.kind: sgd}, adamw: {optimizer: adamw}}\nseeds")
    )
    assert optimizers(own) == [kind(lr=lr) for lr in (1e-3, 3e-3, 1e-2) for kind in (SGD, AdamW)]


@pytest.mark.parametrize(
    ("axis", "labels", "values"),
    [
        ("schedule.warmup: [0, 10]", ["0", "10"], [0, 10]),
        ("model.block: [pre, post]", ["pre", "post"], ["pre", "post"]),
        ("model.decoder.dropout: [0.0, 0.10]", ["0.0", "0.10"], [0.0, 0.1]),
        ("training.clip: [null, 1.0]", ["null", "1.0"], [None, 1.0]),
        ("model.tie_embeddings: [true, off]", ["true", "off"], [True, False]),
    ],
)
def test_other_settings_in_lists(
    cells: Callable[[str], list[Cell]], axis: str, labels: list[str], values: list[Any]
):
    own = cells(RATES.replace("optimizer.lr: [1e-3, 3e-3, 1.0e-2]", axis).replace("[0, 1]", "[]"))
    assert [cell.labels for cell in own] == [(label,) for label in labels]

    def value(cell: Cell) -> Any:
        part: Any = cell.recipe
        for name in axis.partition(":")[0].split("."):
            part = part[name]
        return part

    assert [value(cell) for cell in own] == values


def test_options_without_a_kind_change_the_default_kind():
    recipe = Recipe.from_dict(
        {"optimizer": {"lr": 3e-3}, "schedule": {"warmup": 5}, "task": {"row_length": 8}}
    )
    assert recipe.optimizer == AdamW(lr=3e-3)
    assert (recipe.schedule.kind, recipe.schedule.warmup, recipe.task.kind) == ("cosine", 5, "lm")
    with pytest.raises(InputError, match="unknown option of optimizer 'momentum'"):
        Recipe.from_dict({"optimizer": {"momentum": 0.9}})


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"lr": [1e-3]}, "no setting starts with 'lr', so write labels with changes, as in {0.001: "),
        ({"optimizer.lr": []}, "grid.optimizer.lr: expected labels with their changes, or the values of"),
        ({"optimizer.lr": [{"kind": "sgd"}]}, "grid.optimizer.lr: expected labels with their changes"),
        ({"optimizer.lr": [1, 1]}, "grid.optimizer.lr: expected different values, got"),
    ],
)
def test_lists_that_are_no_axes(grid: dict[str, Any], message: str):
    with pytest.raises(InputError) as raised:
        Study(grid=grid)
    assert message in str(raised.value)


def test_labels_as_written_are_found_by_text_and_by_number(tmp_path: Path):
    file = tmp_path / "rates.yaml"
    file.write_text(RATES)
    study = Study.load(str(file))
    rows = [
        {"optimizer.lr": label, "seed": seed, "loss": float(number + seed)}
        for number, label in enumerate(("1e-3", "3e-3", "1.0e-2"))
        for seed in (0, 1)
    ]
    write_csv(Results(study, rows), tmp_path / "rates.csv")
    assert "3e-3,0,1.0" in (tmp_path / "rates.csv").read_text()
    for results in (Results(study, rows), read_csv(study, tmp_path / "rates.csv")):
        for label in ("3e-3", 3e-3, 0.003):
            assert results.lookup("loss", (label,)).tolist() == [1.0, 2.0]
        assert results.lookup("loss", (slice(2e-3, 0.02),)).tolist() == [[1.0, 2.0], [2.0, 3.0]]
        assert results.curves("optimizer.lr", "loss")["loss"][1][:2] == (0.003, 1.5)


@pytest.mark.parametrize(
    ("stated", "at_once", "expected"),
    [("1", 2, 1), ("6", 2, 6), ("4,2", 1, 4), ("", 10**6, 1), ("x", 10**6, 1)],
)
def test_the_threads_of_parallel_runs(
    monkeypatch: pytest.MonkeyPatch, stated: str, at_once: int, expected: int
):
    monkeypatch.setenv(THREADS, stated)
    assert threads_of_each(at_once) == expected
