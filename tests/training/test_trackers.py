"""Metrics in trackers of experiments: the rows of metrics.jsonl, also after a resume; failures end no run."""

import importlib
import json
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import pytest
from tiny_task import run

from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.training.metrics import check_trackers, read_metrics


def losses(out: Path) -> dict[int, float]:
    """The rows of the record."""
    return {int(row["step"] or 0): row["loss"] or 0.0 for row in read_metrics(out) if "loss" in row}


def of_tensorboard(out: Path) -> dict[int, float]:
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(out / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars("loss")}


def test_tensorboard_has_the_rows_of_the_record(tmp_path: Path):
    run(tmp_path, steps=6, tracking=("tensorboard",))
    run(tmp_path, steps=9, tracking=("tensorboard",), resume=True)
    assert of_tensorboard(tmp_path) == pytest.approx(losses(tmp_path))
    assert [*losses(tmp_path)] == [3, 6, 9]


def test_mlflow_has_the_rows_of_the_record_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    out = tmp_path / "speed" / "first"
    run(out, steps=6, tracking=("mlflow",))
    run(out, steps=9, tracking=("mlflow",), resume=True)
    client = mlflow.MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'speed'")
    (kept,) = client.search_runs([experiment.experiment_id])
    assert kept.info.run_id == json.loads((out / "tracking.json").read_text())["mlflow"]
    assert kept.info.run_name == "first"
    assert kept.data.params["steps"] == "6"
    points = client.get_metric_history(kept.info.run_id, "loss")
    assert {point.step: point.value for point in points} == pytest.approx(losses(out))


def test_wandb_writes_its_files_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "speed" / "first"
    run(out, steps=6, tracking=("wandb",))
    (known,) = json.loads((out / "tracking.json").read_text()).values()
    run(out, steps=9, tracking=("wandb",), resume=True)
    files = list(out.rglob(f"*{known}.wandb"))
    assert len(files) == 2, "both parts are of one run"
    assert all(file.stat().st_size for file in files)


def test_trackio_has_the_rows_of_the_record_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where it is installed; its release needs pillow 12, and works with the tested version 13."""
    for name, value in {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }.items():
        monkeypatch.setenv(name, value)  # before it is imported
    pytest.importorskip("trackio")
    out = tmp_path / "speed" / "first"
    run(out, steps=6, tracking=("trackio",))
    run(out, steps=9, tracking=("trackio",), resume=True)
    with closing(sqlite3.connect(tmp_path / "trackio" / "speed.db")) as records:
        rows = records.execute("SELECT run_id, run_name, step, metrics FROM metrics").fetchall()
        (settings,) = records.execute("SELECT config FROM configs").fetchone()
    assert {(number, name) for number, name, _, _ in rows} == {(rows[0][0], "first")}
    assert {step: json.loads(values)["loss"] for _, _, step, values in rows} == pytest.approx(losses(out))
    assert json.loads(settings)["steps"] == 9


def test_trackers_are_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="tracking: tensorboard is named twice"):
        check_trackers(("tensorboard", "tensorboard"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="tracking: wandb is not installed; pip install wandb"):
        run(tmp_path / "run", steps=3, tracking=("wandb",))
    assert not (tmp_path / "run").exists()


def test_a_service_that_cannot_be_reached_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as closed:  # a port on which nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        mlflow.set_tracking_uri(address)
        with pytest.warns(UserWarning, match="tracking: mlflow is left out from here, as it failed"):
            run(tmp_path, steps=3, tracking=("mlflow", "tensorboard"))
    assert of_tensorboard(tmp_path) == pytest.approx(losses(tmp_path))


def test_the_option_is_a_list_of_names(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "demo", "--tracking", "tensorboard, wandb", "--print"]) == 0
    assert "tracking:\n    - tensorboard\n    - wandb\n" in capsys.readouterr().out
    assert main(["train", "demo", "--tracking", "tensorbord", "--print"]) == 2
    assert "tensorboard" in capsys.readouterr().err
