"""A run goes on with the choices of tuning that it began with, and its bits with them."""

from pathlib import Path

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from polyformer.core.ops import tuning as store
from polyformer.core.ops.product_kernels import PRODUCTS, ProductKernels
from polyformer.core.ops.tuning import forget
from polyformer.training.task import Batch

ONEDNN, BLAS = (
    {"products, 1 thread": {name: {"1x1x1": way} for name in ("forward", "grad_input", "grad_weight")}}
    for way in ("onednn", "blas")
)


class Watching(TinyTask):
    """Notes which products each loss is computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.kernels.append(PRODUCTS().kernels(64, 64, 64).forward)
        return super().loss(model, batch)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(store.PIN, raising=False)
    forget()
    yield
    forget()


def test_a_resumed_run_computes_as_it_began(tmp_path: Path):
    task = Watching()
    store.path().parent.mkdir(parents=True)
    store.save(store.path(), ONEDNN)
    run(tmp_path / "run", task=task, steps=2)
    store.save(store.path(), BLAS)
    forget()
    run(tmp_path / "run", task=task, steps=4, resume=True)
    assert task.kernels == ["onednn"] * 4
    assert PRODUCTS() == ProductKernels.from_dict(BLAS["products, 1 thread"]), "the machine's own, afterwards"
    run(tmp_path / "other", task=task, steps=1)
    assert task.kernels[4:] == ["blas"]


def test_another_processor_goes_on_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    task = Watching()
    store.path().parent.mkdir(parents=True)
    store.save(store.path(), ONEDNN)
    run(tmp_path / "run", task=task, steps=2)
    monkeypatch.setattr("polyformer.training.machine.processor", lambda: "another processor")
    store.save(store.path(), BLAS)
    forget()
    capsys.readouterr()
    run(tmp_path / "run", task=task, steps=4, resume=True)
    assert task.kernels == ["onednn"] * 2 + ["blas"] * 2
    assert "now another processor: the last bits may differ" in capsys.readouterr().out


def test_a_pin_that_differs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run(tmp_path / "run", task=Watching(), steps=2)
    monkeypatch.setenv(store.PIN, "fixed")
    forget()
    capsys.readouterr()
    run(tmp_path / "run", task=Watching(), steps=4, resume=True)
    assert "POLYFORMER_TUNING is set: the last bits may differ" in capsys.readouterr().out
