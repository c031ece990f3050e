"""Names in the rules of studies: what is known of them before the first run."""

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from polyformer import InputError
from polyformer.training.recipes import Recipe
from polyformer_lab.cells import Cell
from polyformer_lab.expression import references
from polyformer_lab.measures.scores import scores
from polyformer_lab.rules import SIZES, check_labels, check_metrics, first_row_note, task_metrics
from polyformer_lab.study import Study, study_names
from tiny_recipes import TEXT, tiny_recipe

GRID = {"rate": {"1e-3": {}, "3e-3": {}}, "block": {"pre": {}, "post": {}}}


def study(*holds: str, grid: dict[str, Any] = GRID, **changes: Any) -> Study:
    return Study.from_dict({"name": "own", "claim": "a", "holds": [*holds], "grid": grid, **changes})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("loss[a, 8] < test.loss[b, :]", [("loss", ("a", 8)), ("test.loss", ("b", slice(None, None)))]),
        ("mean(high(x)) + gain > -t.b", [("t.b", ()), ("x", ())]),
        ("1 < 2 and not (a == 1)", [("a", ())]),
    ],
)
def test_the_metrics_of_an_expression(text: str, expected: list[Any]):
    assert sorted(references(text, {"gain"}), key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            "loss[1e-3, pots] < 1",
            "'loss[1e-3, pots] < 1': unknown label of block 'pots': did you mean 'post'?",
        ),
        ("loss[2e-3, pre] < 1", "unknown label of rate 0.002: expected one of '1e-3', '3e-3'"),
        ("loss[4e-3:, pre] < 1", "no label of rate lies within 0.004:; it has 1e-3, 3e-3"),
        ("loss['3e-3'] < 1", "loss has 1 labels; expected those of rate, block"),
        ("loss[3e-3, pre, 5] < 1", "loss has 3 labels; expected those of rate, block"),
        ("loss < 1", "unknown name 'loss': did you mean"),
    ],
)
def test_wrong_labels_are_named(rule: str, message: str):
    with pytest.raises(InputError) as raised:
        check_labels(study(rule))
    assert message in str(raised.value)


@pytest.mark.parametrize("label", ["3e-3", "0.003", "'3e-3'", ":", "2e-3:"])
def test_labels_as_written_and_as_numbers_are_known(label: str):
    check_labels(study(f"high(loss[{label}, pre]) < 1" if ":" in label else f"loss[{label}, pre] < 1"))


def test_a_measurement_may_add_axes():
    own = {"measure": {"kind": "segments", "lengths": [8]}}
    check_labels(study("perplexity['1e-3', pre, 8] < 1", **own))
    with pytest.raises(InputError, match="has 4 labels"):
        check_labels(study("perplexity['1e-3', pre, 8, 9] < 1", **own))


def test_the_rules_of_the_library_have_known_labels():
    for name in study_names():
        check_labels(Study.load(name))


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "lines.txt").write_text(TEXT)
    return tiny_recipe(tmp_path / "lines.txt")


def test_metrics_are_known_without_a_model_and_are_those_of_a_run(recipe: Recipe, tmp_path: Path):
    known = task_metrics(recipe)
    assert known is not None
    cell = Cell((), None, tmp_path / "run", recipe.to_dict(), "scores", {})
    row = scores(cell)
    assert known | {*SIZES} == {*row, "peak_allocated_mib"}
    assert "validation.ngram_perplexity" not in row or "validation.ngram_perplexity" in known
    layers, logits = by_hand(cell)
    assert 0.85 < (row["training_flops"] - layers) / logits <= 1, "the last token of a text has no logits"
    assert row["peak_resident_mib"] > 50, "Python and torch alone are larger"
    assert math.isfinite(row["peak_resident_mib"])
    again = Cell((), None, tmp_path / "run", recipe.to_dict(), "scores", {})
    assert scores(again)["peak_resident_mib"] == row["peak_resident_mib"], "the peak is that of training"


def by_hand(cell: Cell) -> tuple[float, float]:
    """The operations of training in the layers, and at most in the logits: three times those of a pass."""
    fitted = cell.fitted
    assert fitted.model.decoder is not None
    linear = [each for each in fitted.model.decoder.modules() if isinstance(each, nn.Linear)]
    width, vocabulary = fitted.model.config.hidden_size, fitted.model.config.vocab_size
    rows, length, steps = 4, 16, 4
    matrices = 2 * rows * length * sum(each.weight.numel() for each in linear)
    attention = 2 * 2 * rows * length**2 * width
    logits = 2 * rows * length * width * vocabulary
    # The backward pass of fused attention has five products: it computes the scores again.
    return steps * (3 * matrices + attention * (1 + 5 / 2)), steps * 3 * logits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"holds": ["validation.perplexty[a] > 1"]}, "did you mean 'validation.perplexity'"),
        ({"holds": ["validation.f1[a] > 1"]}, "unknown metric or name 'validation.f1'"),
        (
            {"metrics": ["secnds", "parameters"]},
            "metrics: unknown metric or name 'secnds': did you mean 'seconds'",
        ),
        ({"plot": {"x": "seconds", "y": "validation.lss"}}, "plot: unknown metric or name 'validation.lss'"),
    ],
)
def test_unknown_metrics_are_named_before_training(recipe: Recipe, changes: dict[str, Any], message: str):
    own = Study.from_dict({"name": "own", "claim": "a", "grid": {"arm": {"a": {}}}, **changes})
    cell = Cell(("a",), None, Path("absent"), recipe.to_dict(), "scores", {})
    with pytest.raises(InputError) as raised:
        check_metrics(own, [cell])
    assert message in str(raised.value)


def test_metrics_that_only_the_run_knows_are_no_error(recipe: Recipe):
    own = study("metric['1e-3', pre] > 1")
    absent = Recipe.from_dict({**recipe.to_dict(), "data": {"path": "absent.txt"}})
    for kind, values in (("scores", absent), ("segments", recipe)):
        check_metrics(own, [Cell(("1e-3", "pre"), None, Path("absent"), values.to_dict(), kind, {})])
    assert first_row_note(own, ["metric", "seconds"]) == ""
    assert "unknown metric or name in the first run 'metric': did you mean 'metrics'" in first_row_note(
        own, ["metrics"]
    )
