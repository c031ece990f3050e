"""Checkpoints on a full disk, damaged, of another model; what they hold."""

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_task import TinyModel, TinyTask, run
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.files import read_tensors, write_tensors
from polyformer.training.checkpoint import checksum, read_state
from polyformer.training.optimizers import AdamW
from polyformer.training.restore import load_checkpoint
from polyformer.training.task import Batch


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    run(out, steps=10)
    return out


@pytest.fixture
def half(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run with checkpoints at steps 5 and 10."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def twelve(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, gone on with from its checkpoint of step 5 to step 12."""
    out = Path(shutil.copytree(finished, tmp_path_factory.mktemp("twelve") / "run"))
    run(out, steps=12, resume=True, from_step=5)
    return out


@contextmanager
def disk_that_fills() -> Iterator[TinyTask]:
    """A task in whose eighth step the disk is full: from then on no file may grow beyond 1000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Filling(TinyTask):
        calls = 0

        def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
            self.calls += 1
            if self.calls == 8:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
            return super().loss(model, batch)

    try:
        yield Filling()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def files(folder: Path) -> dict[str, bytes]:
    """Everything under `folder`."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_names_are_the_models_own_and_tied_weights_stand_once(half: Path) -> None:
    folder = half / "checkpoints/step-00000010"
    assert sorted(os.listdir(folder)) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    names = set(TinyModel(0.0, torch.float32).state_dict())
    assert set(read_tensors(folder / "model.safetensors")) == names - {"out.weight"}
    moments = {
        f"{name}/{key}"
        for name in names - {"out.weight", "calls"}
        for key in ("exp_avg", "exp_avg_sq", "step")
    }
    assert set(read_tensors(folder / "optimizer.safetensors")) == moments
    state = json.loads((folder / "state.json").read_text())
    assert set(state["versions"]) == {"polyformer", "torch", "numpy", "python"}
    assert set(state["machine"]) == {"device", "instructions", "onednn", "threads", "processes"}
    assert isinstance(state["tuning"], dict)
    assert (state["progress"]["step"], state["progress"]["epoch"], state["progress"]["used"]) == (10, 1, 3)


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    message = r"cannot write .*step-00000010: no space left .*; free some space .* is intact"
    with disk_that_fills() as task, pytest.raises(InputError, match=message):
        run(full, task=task)
    assert os.listdir(full / "checkpoints") == ["step-00000005"]
    run(full, resume=True)
    run(free)
    assert files(full / "checkpoints") == files(free / "checkpoints")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "flipped", "pickle"])
def test_damage_names_the_file_and_the_way_out(half: Path, twelve: Path, name: str, damage: str) -> None:
    latest = half / "checkpoints/step-00000010"
    file = latest / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "missing":
        file.unlink()
    elif damage == "flipped":
        content[-5 if name != "state.json" else 0] ^= 0x10
        file.write_bytes(content)
    else:
        torch.save({"a": 1}, file)
    with pytest.raises(InputError) as caught:
        run(half, steps=12, resume=True)
    assert str(file) in str(caught.value)
    assert str(caught.value).endswith(
        f"; resume from the checkpoint before it: polyformer train --resume {half} --from-step 5"
    )
    _, result = run(half, steps=12, resume=True, from_step=5)
    assert result.step == 12
    assert files(half / "checkpoints") == files(twelve / "checkpoints")


def test_the_way_out_when_there_is_no_earlier_one(tmp_path: Path) -> None:
    run(tmp_path, steps=2)
    (tmp_path / "checkpoints/step-00000002/state.json").write_text("{}")
    message = (
        r"is not the state of a training run; there is no intact checkpoint before it: start again in "
        rf"another folder: polyformer train {tmp_path}/recipe.yaml --out NEW"
    )
    with pytest.raises(InputError, match=message):
        run(tmp_path, steps=3, resume=True)


def test_of_several_damaged_ones_the_newest_whole_one_is_offered(half: Path) -> None:
    run(half, steps=12, resume=True, keep=3)
    for step in (10, 12):
        file = half / f"checkpoints/step-{step:08d}/optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"step-00000012/optimizer.*--from-step 5$"):
        run(half, steps=15, resume=True)
    with pytest.raises(InputError, match=r"from_step: .* no checkpoint of step 7; it has 5, 10, 12"):
        run(half, steps=15, resume=True, from_step=7)


def edited(folder: Path, sign: bool, **changes: object) -> None:
    """Change the progress in a checkpoint's state; with `sign` by someone who mends the checksum too."""
    state = json.loads((folder / "state.json").read_text())
    state["progress"] |= changes
    if sign:
        state["checksum"] = checksum({name: value for name, value in state.items() if name != "checksum"})
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("step", "sign"), [(9, False), *((step, True) for step in (11, 9, -5, 0, 10**9, 10.0, "10", None))]
)
def test_an_edited_state_is_refused(half: Path, step: object, sign: bool) -> None:
    edited(half / "checkpoints/step-00000010", sign, step=step)
    message = "its step is" if sign else "damaged or was edited: its content does not match its checksum"
    with pytest.raises(InputError, match=rf"state.json.* {message}.*--from-step 5$"):
        run(half, steps=12, resume=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1),
        ("used", 1.5),
        ("used", -3),
        ("seed", "3"),
        ("best_step", 11),
        ("best_step", True),
        ("stale", 99),
        ("loss_sum", float("nan")),
        ("weight_sum", "much"),
        ("unknown", 1),
    ],
)
def test_states_out_of_range_are_refused(half: Path, name: str, value: object) -> None:
    edited(half / "checkpoints/step-00000010", True, **{name: value})
    with pytest.raises(InputError, match=rf"state.json.*{name if name != 'unknown' else 'not the state'}"):
        run(half, steps=12, resume=True)


def test_another_format_is_refused_with_its_versions(half: Path) -> None:
    folder = half / "checkpoints/step-00000010"
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 99}))
    with pytest.raises(InputError, match=r"written as format 99 by \{'polyformer': .* reads format 3"):
        read_state(folder)


def test_tensors_of_another_model_or_optimizer_are_refused(half: Path) -> None:
    folder = half / "checkpoints/step-00000010"
    with pytest.raises(InputError, match=r"optimizer.safetensors belongs to AdamW, the run is set to SGD"):
        run(half, steps=12, resume=True, optimizer="sgd")
    model = TinyModel(0.0, torch.float32)
    model.inner = torch.nn.Linear(8, 9)
    with pytest.raises(InputError, match=r"model.safetensors does not fit this model: .*inner.weight"):
        load_checkpoint(folder, model, AdamW().build(model))
    model = TinyModel(0.0, torch.float32)
    model.inner.requires_grad_(False)
    with pytest.raises(InputError, match=r"it has 'inner.bias', which is not trained here"):
        load_checkpoint(folder, model, AdamW().build(model))


def test_another_seed_is_refused(half: Path) -> None:
    edited(half / "checkpoints/step-00000010", True, seed=4)
    with pytest.raises(InputError, match=r"seed: the run in .* has 4, got 3; use the same one"):
        run(half, steps=12, resume=True)


def test_optimizer_memory_survives_in_another_order_of_groups(half: Path) -> None:
    """By name, not by place: the same parameters split into groups differently find their own."""
    folder = half / "checkpoints/step-00000010"
    model = TinyModel(0.0, torch.float32)
    optimizer = torch.optim.AdamW(list(reversed(list(model.parameters()))))
    load_checkpoint(folder, model, optimizer)
    saved = read_tensors(folder / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], saved[f"{name}/exp_avg"])
    assert torch.equal(model.out.weight, model.table.weight)
    assert model.out.weight is model.table.weight


def test_leftovers_of_killed_writers_are_removed(half: Path) -> None:
    (half / "checkpoints/.step-00000015.0123abcd.partial").mkdir()
    (half / "checkpoints/.step-00000015.0123abcd.partial/model.safetensors").write_bytes(b"half")
    (half / "checkpoints/step-by-hand").mkdir()
    run(half, steps=11, resume=True)
    kept = ["step-00000010", "step-00000011", "step-by-hand"]
    assert sorted(os.listdir(half / "checkpoints")) == kept


def test_a_file_with_a_strange_tensor_is_not_a_checkpoint(half: Path) -> None:
    file = half / "checkpoints/step-00000010/model.safetensors"
    write_tensors(file, {"strange": torch.zeros(2)})
    with pytest.raises(InputError, match="is damaged: its bytes are not those written"):
        run(half, steps=12, resume=True)
