"""What a run does: its record, accumulation, best, patience, averages, errors; on one process."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyModel, TinyTask, run, settings
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.files import read_tensors
from polyformer.training.config import ReportingConfig, SavingConfig, TrainingConfig
from polyformer.training.metrics import plot_curves, read_metrics
from polyformer.training.task import Batch, TrainingTask


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(out / f"checkpoints/step-{step:08d}/model.safetensors")


def kept(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir())


def test_the_tiny_task_is_a_task() -> None:
    assert isinstance(TinyTask(), TrainingTask)


def test_a_run_learns_and_leaves_its_record(tmp_path: Path) -> None:
    model, result = run(tmp_path, steps=40, dropout=0.0, lr=0.02, curves=True)
    rows = read_metrics(tmp_path)
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    assert losses[-1] < 0.8 * losses[0]
    assert [row["step"] for row in rows] == sorted({*range(3, 40, 3), *range(10, 41, 10)})
    assert (result.step, result.stopped_early) == (40, False)
    assert result.metrics["loss"] == rows[-1]["valid_loss"]
    assert not model.training
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights(tmp_path, 40).items())
    with (tmp_path / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["step"]) for row in table] == [row["step"] for row in rows]
    assert table[-1]["valid_worst"] == str(rows[-1]["valid_worst"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_logged_loss_is_the_mean_over_labelled_tokens(tmp_path: Path) -> None:
    task = TinyTask()
    model = TinyModel(0.0, torch.float64)
    batches = list(task.batches(0, 0, 0, 1))[:3]
    with torch.no_grad():
        total = sum(float(task.loss(model, batch)) * task.weight(batch) for batch in batches)
    # The checkpoint in between takes the numbers off the device, but must not lose them.
    run(tmp_path, steps=3, dropout=0.0, dtype=torch.float64, lr=1e-30, checkpoint_every=2)
    row = read_metrics(tmp_path)[0]
    assert row["loss"] == pytest.approx(total / sum(map(task.weight, batches)), rel=1e-12)


def test_four_small_batches_are_one_large_one(tmp_path: Path) -> None:
    """Ragged batches, an epoch that does not divide by four, a batch without labels: all the same."""

    class Joined(TinyTask):
        def batches(self, epoch: int, skip: int, rank: int, world: int) -> Any:
            small = list(super().batches(epoch, 0, 0, 1))
            for start in range(skip * 4, len(small), 4):
                group = small[start : start + 4]
                yield {name: torch.cat([batch[name] for batch in group]) for name in group[0]}

    options: dict[str, Any] = {
        "dropout": 0.0,
        "dtype": torch.float64,
        "steps": 7,
        "keep": 9,
        "checkpoint_every": 1,
    }
    joined_model, _ = run(tmp_path / "one", task=Joined(empty=2), **options)
    run(tmp_path / "four", task=TinyTask(empty=2), accumulate=4, **options)
    for step in range(1, 8):
        for name, value in weights(tmp_path / "one", step).items():
            if name != "calls":
                assert torch.allclose(value, weights(tmp_path / "four", step)[name], rtol=0, atol=1e-10), (
                    step,
                    name,
                )
    assert not torch.equal(joined_model.table.weight, TinyModel(0.0, torch.float64).table.weight)
    for first, second in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "four")):
        for name in ("loss", "grad_norm", "epoch", "valid_loss"):
            assert first.get(name) == pytest.approx(second.get(name), abs=1e-10), name


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    before = TinyModel(0.0, torch.float64)
    options: dict[str, Any] = {"dropout": 0.0, "dtype": torch.float64, "steps": 1, "optimizer": "sgd"}
    norms = {}
    for name, clip in (("clipped", 0.01), ("free", None)):
        model, _ = run(tmp_path / name, clip=clip, **options)
        moved = [(new - old).norm() for new, old in zip(model.parameters(), before.parameters())]
        rate = 0.01 / 4  # the first of 4 warm-up steps
        norms[name] = float(torch.stack(moved).norm().detach()) / rate
    rows = [read_metrics(tmp_path / name)[0] for name in norms]
    assert rows[0]["grad_norm"] == rows[1]["grad_norm"] == pytest.approx(norms["free"])
    assert norms["clipped"] == pytest.approx(0.01, rel=1e-3)


class Scripted(TinyTask):
    """Validation goes as the script says."""

    def __init__(self, values: list[float], direction: Any = "min") -> None:
        super().__init__()
        self.values, self.direction = values, direction

    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        return {"loss": self.values.pop(0)}


def test_patience_stops_and_best_is_kept_and_restored(tmp_path: Path) -> None:
    script = [3.0, 2.0, math.nan, 2.5, 2.0]
    model, result = run(
        tmp_path,
        task=Scripted(script),
        evaluate_every=2,
        checkpoint_every=3,
        patience=3,
        final="best",
    )
    assert (result.step, result.stopped_early, result.best, result.best_step) == (10, True, 2.0, 4)
    assert result.metrics == {"loss": 2.0}
    assert result.kept.reason == (
        "kept the weights of step 4: loss 2 on validation data; the last weights (step 10): loss 2"
    )
    assert kept(tmp_path) == [4, 9, 10]
    assert torch.equal(model.table.weight, weights(tmp_path, 4)["table.weight"])
    assert result.checkpoint.name == "step-00000010"


def test_larger_may_be_better(tmp_path: Path) -> None:
    _, result = run(tmp_path, task=Scripted([1.0, 3.0, 2.0], "max"), steps=6, evaluate_every=2, keep=1)
    assert (result.best, result.best_step) == (3.0, 4)


def test_a_finished_run_resumed_does_nothing_more(tmp_path: Path) -> None:
    _, first = run(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model, again = run(tmp_path, resume=True)
    assert again == first
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert torch.equal(model.table.weight, weights(tmp_path, 20)["table.weight"])


def test_a_finished_run_may_go_on_for_longer(tmp_path: Path) -> None:
    run(tmp_path, steps=8)
    _, result = run(tmp_path, steps=12, resume=True)
    assert result.step == 12
    assert kept(tmp_path)[-1] == 12


def test_an_average_that_is_better_on_validation_is_the_end(tmp_path: Path) -> None:
    task = Scripted(
        [5.0, 4.0, *[9.0] * 5, 3.5]
    )  # best at step 6, which is not a regular one; then the average
    model, result = run(tmp_path, task=task, final="average", average=3, keep=1, evaluate_every=3)
    assert kept(tmp_path) == [6, 10, 15, 20]
    for name, value in model.named_parameters():
        mean = sum(weights(tmp_path, step)[name].double() for step in (10, 15, 20)) / 3
        assert torch.equal(value, torch.as_tensor(mean).float()), name
    assert model.calls == 20  # a counter has no mean
    assert result.metrics == {"loss": 3.5}
    assert (result.kept.step, result.kept.reason) == (
        None,
        "kept the average of the last 3 checkpoints: loss 3.5 on validation data; "
        "the weights of step 6: loss 4; the last weights (step 20): loss 9",
    )


def test_an_average_that_is_worse_on_validation_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Scripted([5.0, 4.0, *[9.0] * 5, 4.5])
    model, result = run(tmp_path, task=task, final="average", average=3, keep=1, evaluate_every=3)
    assert result.kept.step == 6
    assert result.metrics == {"loss": 4.0}
    assert torch.equal(model.table.weight, weights(tmp_path, 6)["table.weight"])
    assert "the average of the last 3 checkpoints: loss 4.5" in capsys.readouterr().out.splitlines()[-1]


def test_of_equal_evaluations_the_lower_loss_is_kept(tmp_path: Path) -> None:
    class Tied(Scripted):
        best = "accuracy"

        def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
            return {"accuracy": 0.5, "loss": self.values.pop(0)}

    _, result = run(tmp_path, task=Tied([3.0, 1.0, 2.0], "max"), steps=6, evaluate_every=2, final="best")
    assert (result.best_step, result.kept.step) == (4, 4)
    assert result.metrics == {"accuracy": 0.5, "loss": 1.0}


def test_the_last_weights_are_kept_with_a_word_about_better_ones(tmp_path: Path) -> None:
    _, result = run(tmp_path, task=Scripted([1.0, 2.0]), steps=4, evaluate_every=2)
    assert result.kept.reason == (
        "kept the last weights (step 4): loss 2 on validation data; "
        "step 2: loss 1, which training.saving.final: best keeps"
    )


def test_evaluating_more_often_changes_nothing(tmp_path: Path) -> None:
    class Noisy(TinyTask):
        def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
            torch.rand(3)
            return super().evaluate(model, accelerator)

    rare, _ = run(tmp_path / "rare", task=Noisy())
    often, _ = run(tmp_path / "often", task=Noisy(), evaluate_every=1, log_every=1)
    assert all(map(torch.equal, rare.parameters(), often.parameters()))


def test_bf16_products_leave_the_weights_in_float32(tmp_path: Path) -> None:
    exact, _ = run(tmp_path / "exact", dropout=0.0)
    rounded, _ = run(tmp_path / "rounded", dropout=0.0, precision="bf16")
    assert rounded.inner.weight.dtype == torch.float32
    assert not torch.equal(exact.inner.weight, rounded.inner.weight)
    assert torch.allclose(exact.inner.weight, rounded.inner.weight, atol=5e-3)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"
)  # torch's own, inside
def test_compiling_changes_neither_the_mathematics_nor_the_names(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dropout": 0.0, "steps": 2, "task": TinyTask(rows=1)}
    plain, _ = run(tmp_path / "plain", **options)
    compiled, _ = run(tmp_path / "compiled", compile=True, **options)
    assert all(map(torch.allclose, compiled.parameters(), plain.parameters()))
    assert weights(tmp_path / "compiled", 2).keys() == weights(tmp_path / "plain", 2).keys()
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_the_switch_for_recomputing_is_set_and_put_back(tmp_path: Path) -> None:
    class Watching(TinyTask):
        seen: set[bool] = set()  # noqa: RUF012

        def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            self.seen.add(bool(model.recompute))
            return super().loss(model, batch)

    model, _ = run(tmp_path, steps=1, task=Watching(), recompute=True)
    assert Watching.seen == {True}
    assert model.recompute is False


class Exploding(TinyTask):
    """The loss is not a number from a step on."""

    calls = 0

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        return model(**batch) * (math.inf if self.calls >= 7 else 1.0)


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"not a finite number at step 7; .*step-00000005 is intact; lower the"
    ):
        run(tmp_path, task=Exploding(), log_every=4)
    assert kept(tmp_path) == [5]
    assert all(value.isfinite().all() for value in weights(tmp_path, 5).values())
    assert [row["step"] for row in read_metrics(tmp_path)] == [4]


def test_settings_out_of_range_are_refused_in_a_line(tmp_path: Path) -> None:
    run(tmp_path / "done", steps=1)
    with pytest.raises(
        InputError, match=r"already holds a run \(to step-00000001\); resume it or name another"
    ):
        run(tmp_path / "done")
    with pytest.raises(InputError, match="steps: expected 1 or more, got -1"):
        settings(steps=-1)
    with pytest.raises(InputError, match="clip: expected a number above 0"):
        settings(clip=0.0)
    with pytest.raises(InputError, match="keep: expected 1 or more, got 0"):
        SavingConfig(keep=0)
    with pytest.raises(InputError, match="log_every: expected 1 or more, got 0"):
        ReportingConfig(log_every=0)
    with pytest.raises(InputError, match="'fp16' needs a CUDA device; on the CPU use 'bf16' or 'no'"):
        run(tmp_path / "new", precision="fp16")
    with pytest.raises(InputError, match="there is no training batch in epoch 0; the data set is empty"):
        run(tmp_path / "new", task=TinyTask(batches=0))
    with pytest.raises(InputError, match="no batch of epoch 0 has a labelled token"):
        run(tmp_path / "new", task=TinyTask(batches=1, empty=0))
    with pytest.raises(InputError, match="unknown metric to choose the best by 'loss'"):
        run(tmp_path / "named", task=Misnamed(), steps=1)
    with pytest.raises(InputError, match="the task has no data for one"):
        run(tmp_path / "blind", task=Blind(), steps=1, patience=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device: 'cuda' was requested, but torch finds no CUDA device"):
        run(tmp_path, device="cuda")


class Misnamed(TinyTask):
    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        return {"accuracy": 1.0}


class Blind(TinyTask):
    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        return {}


def test_without_validation_data_a_run_still_runs(tmp_path: Path) -> None:
    _, result = run(tmp_path, task=Blind(), steps=4)
    assert (result.metrics, result.best) == ({}, None)


def test_configurations_go_to_files_and_back() -> None:
    config = settings(patience=3, precision="bf16", final="average")
    assert TrainingConfig.from_yaml(config.to_yaml()) == config
    assert TrainingConfig.from_json(config.to_json()) == config


def test_curves_need_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InputError, match=r"metrics.jsonl has no rows yet"):
        plot_curves(tmp_path)
    with pytest.raises(InputError, match=r"no such file: .*metrics.jsonl"):
        plot_curves(tmp_path / "absent")


def test_the_first_step_is_a_sign_of_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, steps=4, log_every=3, evaluate_every=9, lr=1e-30, dropout=0.0)
    first, second, third, _ = capsys.readouterr().out.splitlines()
    task = TinyTask()
    with torch.no_grad():
        expected = float(task.loss(TinyModel(0.0, torch.float32), next(task.batches(0, 0, 0, 1))))
    assert first.startswith(f"first step: loss {expected:.4f}, ")
    assert first.endswith(" s; metrics every 3 steps")
    assert (second[:8], third[:8]) == ("step 3/4", "step 4/4")
    run(tmp_path / "rows", steps=2, log_every=1)
    assert "first step" not in capsys.readouterr().out


def test_fewer_steps_than_made_are_refused(tmp_path: Path) -> None:
    run(tmp_path, steps=5)
    with pytest.raises(
        InputError, match=r"steps: the run in .* is already at step 5, got 4; expected as many or more"
    ):
        run(tmp_path, steps=4, resume=True)
