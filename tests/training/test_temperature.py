"""Temperature scaling: the minimum of the NLL, the calibration error, and the weights of a run."""

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

import polyformer
from launching import torchrun
from polyformer.data import load
from polyformer.models.architectures import build_model
from polyformer.nn.heads import ClassifyConfig, DistilledConfig
from polyformer.training.machine import world
from polyformer.training.recipes import Recipe, fit
from polyformer.training.recipes.run import Run
from polyformer.training.task import BINS, Reliability, calibrated, fitted_temperature


def sample(scale: float, rows: int = 600, labels: int = 4) -> tuple[Tensor, Tensor]:
    """Logits, and labels that are drawn from their probabilities after a division by `scale`."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, labels, generator=generator).double() * 4
    return logits, torch.multinomial((logits / scale).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_temperature_minimizes_the_nll(scale: float):
    logits, labels = sample(scale)
    temperature = fitted_temperature(logits, labels)
    assert temperature is not None
    assert temperature == pytest.approx(scale, rel=0.2)
    nll = lambda t: float(torch.nn.functional.cross_entropy(logits / t, labels))  # noqa: E731
    best = minimize_scalar(nll, bounds=(0.1, 20), method="bounded", options={"xatol": 1e-8})
    assert temperature == pytest.approx(best.x, rel=1e-4)


def test_the_calibration_error_is_that_of_its_definition():
    logits, labels = sample(3.0)
    p = logits.softmax(-1).numpy()
    sure, right = p.max(1), p.argmax(1) == labels.numpy()
    expected, edges = 0.0, np.linspace(0, 1, BINS + 1)
    for low, high in itertools.pairwise(edges):
        inside = (low < sure) & (sure <= high)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    side = Reliability.of(logits, labels)
    assert side.error == pytest.approx(expected)
    assert sum(rows for _, _, rows in side.bins) == len(labels)
    result = calibrated(logits, labels)
    assert result.changes
    assert result.after.nll < result.before.nll
    assert result.after.error < result.before.error / 3


def test_rows_without_a_finite_temperature_keep_1():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    for labels in ([0, 1], [1, 0]):  # all right: T -> 0 is best; all wrong: T -> infinity
        result = calibrated(logits, torch.tensor(labels))
        assert (result.temperature, result.before) == (1.0, result.after)
        assert "temperature 1, no other lowers the NLL of 2 validation rows" in result.note()


@pytest.mark.parametrize("head", [ClassifyConfig(num_labels=3), DistilledConfig(num_labels=3)])
def test_logits_are_divided_in_the_weights(head: ClassifyConfig | DistilledConfig):
    model: Any = build_model(polyformer.model_config("encoder-tiny", {"head": head, "vocab_size": 20})).eval()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.no_grad():
        before = model(ids).logits
        assert model.head.divide_logits(2.5)
        torch.testing.assert_close(model(ids).logits, before / 2.5)


MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"data": 2}, {"shard": 2}, {"tensor": 2}),
    4: ({"data": 2, "shard": 2}, {"shard": 2, "tensor": 2}),
}
"""The ways in which so many processes divide a model that has labels: its task has no other."""


def recipe(folder: Path, validation: bool, parallel: dict[str, int] | None = None) -> Recipe:
    """A classifier of words, some of them with another label in the validation data."""
    rows = [f"{word} {word} film,{label}" for word, label in (("good", "pos"), ("bad", "neg"))] * 12
    held = ["good good film,pos", "bad bad film,neg", "good good film,pos", "good good film,neg"] * 3
    for name, lines in (("train", rows), ("valid", held)):
        if not (folder / f"{name}.csv").exists():  # several processes read what the test wrote
            (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    data: dict[str, Any] = {"path": str(folder / "train.csv"), "validation_fraction": 0.0}
    if validation:
        data |= {"validation": str(folder / "valid.csv"), "test": str(folder / "valid.csv")}
    return Recipe.from_dict(
        {
            "task": {"kind": "classify", "max_length": 32, "batch_tokens": 256},
            "model": {"preset": "encoder-tiny", "hidden_size": 16, "num_hidden_layers": 1},
            "data": data,
            "tokenizer": {"algorithm": "wordpiece", "vocab_size": 60},
            "optimizer": {"kind": "adamw", "lr": 0.02},
            "training": {"steps": 30, "engine": {"device": "cpu", "parallel": parallel or {}}},
        }
    )


def test_a_run_is_calibrated_and_its_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    fitted = fit(recipe(tmp_path, validation=True), tmp_path / "run")
    assert "temperature " in capsys.readouterr().out
    record = Run.open(tmp_path / "run").facts["calibration"]
    assert record["temperature"] > 1.1
    assert record["after"]["nll"] < record["before"]["nll"]
    for split in ("validation", "test"):
        assert fitted.scores[split]["loss"] == pytest.approx(record["after"]["nll"], rel=1e-4)
    loaded = polyformer.load(tmp_path / "run", "cpu")
    shares = loaded.classify("good good film").probabilities
    rows = [("good good film", "pos")] * 6 + [("good good film", "neg")] * 3 + [("bad bad film", "neg")] * 3
    nll = -np.mean([np.log(loaded.classify(text).probabilities[label]) for text, label in rows])
    assert nll == pytest.approx(record["after"]["nll"], rel=1e-4)
    loaded.model.save_pretrained(tmp_path / "copy")
    loaded.task.tokenizer.save(tmp_path / "copy")
    copied = polyformer.load(tmp_path / "copy", "cpu").classify("good good film").probabilities
    assert [*copied.values()] == pytest.approx([*shares.values()], abs=1e-6)
    from polyformer.cli.plots.report.page import reliability

    page = reliability(Run.open(tmp_path / "run"))
    assert "expected calibration error" in page
    assert "perfectly calibrated" in page
    assert (
        json.loads((tmp_path / "run" / "run.json").read_text())["metrics"]["validation"]["accuracy"] == 0.75
    )


def test_without_validation_data_there_is_no_temperature(tmp_path: Path):
    fit(recipe(tmp_path, validation=False), tmp_path / "run")
    assert "calibration" not in Run.open(tmp_path / "run").facts


@pytest.mark.parametrize("processes", MESHES)
def test_divided_weights_are_calibrated_like_whole_ones(tmp_path: Path, processes: int):
    """The saved model has the recorded loss on the validation rows, each of them counted once."""
    recipe(tmp_path, validation=True)
    ended = torchrun(__file__, tmp_path, processes=processes)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("on 12 validation rows: NLL") == len(MESHES[processes])
    for mesh in MESHES[processes]:
        run = Run.open(tmp_path / "-".join(mesh))
        record = run.facts["calibration"]
        assert record["temperature"] > 1.1, mesh
        assert sum(rows for _, _, rows in record["before"]["bins"]) == 12
        rows = load(run.recipe.data, run.recipe.task.needs).validation
        assert rows is not None
        for measured in (run.task.score(run.measured("cpu"), rows), run.facts["metrics"]["validation"]):
            assert measured["loss"] == pytest.approx(record["after"]["nll"], rel=1e-4), mesh
        model: Any = run.model("cpu")
        model.head.divide_logits(1 / record["temperature"])
        trained = run.task.score(model, rows)["loss"]
        assert trained == pytest.approx(record["before"]["nll"], rel=1e-4), mesh


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for mesh in MESHES[world()]:
        assert math.prod(mesh.values()) == world()
        fit(recipe(folder, validation=True, parallel=mesh), folder / "-".join(mesh))
