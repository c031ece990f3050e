"""Runs whose model is divided over processes compute what one process does. Real processes, gloo."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_cases import KINDS, difference, run

from polyformer.core.files import write_tensors
from polyformer.training.checkpoint import Checkpoints

MESHES: dict[str, dict[str, int]] = {"shard": {"shard": 2}, "context": {"context": 2}}
"""Those of two processes, by name."""

WHOLE = "encoder_decoder", "experts"
"""Kinds of which one process needs whole texts."""

EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "accumulated": ("decoder", {"accumulate": 2, "steps": 3}),
    "recomputed": ("decoder", {"recompute": True}),
    "muon": ("decoder", {"optimizer": "muon"}),
    "averaged": ("frozen", {"optimizer": "sgd", "lr": 0.3, "final": "average"}),
}


def kinds_of(mesh: str) -> list[str]:
    """Those that a mesh can hold."""
    return [kind for kind in KINDS if mesh != "context" or kind not in WHOLE]


def cases(folder: Path) -> list[tuple[Path, str, dict[str, Any]]]:
    """Every run of two processes: where, of what kind, how."""
    kinds = [
        (folder / mesh / kind, kind, {"mesh": size, "accumulate": 2 if mesh == "context" else 1})
        for mesh, size in MESHES.items()
        for kind in kinds_of(mesh)
    ]
    return kinds + [
        (folder / "shard" / name, kind, {"mesh": {"shard": 2}, **how}) for name, (kind, how) in EXTRA.items()
    ]


def both_processes(folder: Path) -> None:
    """What each of the two runs."""
    torch.set_num_threads(1)
    for out, kind, how in cases(folder):
        write(out, *run(out, kind, **how))
    run(folder / "moved", "decoder", steps=2, mesh={"shard": 2})
    write(folder / "taken up", *run(folder / "taken up", "decoder", resume=True, mesh={"shard": 2}))


def write(out: Path, model: torch.nn.Module, result: object) -> None:
    """The final weights, which the first process has."""
    if os.environ.get("RANK", "0") == "0":
        write_tensors(out / "final.safetensors", model.state_dict())


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two processes left their runs; that in "taken up" was begun by one."""
    folder = tmp_path_factory.mktemp("divided")
    run(folder / "taken up", "decoder", steps=2, accumulate=2)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[:6000]
    assert "the layers of decoder are gathered all at once: a reversible stack" in ended.stdout
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by one process: a folder by kind, and by what else is done."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {kind: (kind, {}) for kind in KINDS} | EXTRA
    for name, (kind, how) in runs.items():
        accumulate = 2 * how.get("accumulate", 1)
        write(folder / name, *run(folder / name, kind, **{**how, "accumulate": accumulate}))
    return folder


@pytest.mark.parametrize(("mesh", "kind"), [(mesh, kind) for mesh in MESHES for kind in kinds_of(mesh)])
def test_two_processes_compute_what_one_does(mesh: str, kind: str, launched: Path, alone: Path):
    assert difference(alone / kind, launched / mesh / kind) < 1e-10


@pytest.mark.parametrize("name", EXTRA)
def test_whatever_else_is_chosen(name: str, launched: Path, alone: Path):
    assert difference(alone / name, launched / "shard" / name) < 1e-10


def test_a_plain_run_goes_on_where_a_divided_one_left(launched: Path, alone: Path):
    path = Checkpoints(launched / "moved").latest()
    assert path is not None
    assert len(list((path / "model").glob("shard-*"))) == 2
    write(launched / "moved", *run(launched / "moved", "decoder", resume=True, accumulate=2))
    assert difference(alone / "decoder", launched / "moved") < 1e-10


def test_a_divided_run_goes_on_where_a_plain_one_left(launched: Path, alone: Path):
    assert difference(alone / "decoder", launched / "taken up") < 1e-10


if __name__ == "__main__":
    both_processes(Path(sys.argv[1]))
