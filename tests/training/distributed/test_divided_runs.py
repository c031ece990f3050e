"""Runs whose model is divided over processes compute what one process does. Real processes, gloo.

Two of them; with the environment variable PROCESSES=4 four, on meshes of two dimensions, and with 8 of three.
"""

import math
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from divided_cases import FINAL, KINDS, Texts, build, difference, metric_difference, run
from divided_vocabulary import check_vocabulary
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from launching import torchrun
from polyformer.core.errors import InputError
from polyformer.core.files import write_tensors
from polyformer.models.presets import create_model
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.config import EngineConfig, ParallelConfig
from polyformer.training.distributed import sharded_files
from polyformer.training.distributed.fully_sharded import apply_fsdp, deferred_draw, deferred_initialization
from polyformer.training.distributed.sharded_files import gather_full_state_dict, gather_tensor
from polyformer.training.loop import open_engine
from polyformer.training.metrics import read_metrics

PROCESSES = int(os.environ.get("PROCESSES", "2"))

MESHES: dict[str, dict[str, Any]] = {
    2: {
        "shard": {"shard": 2},
        "tensor": {"tensor": 2},
        "context": {"context": 2},
        "pipeline": {"pipeline": 2},
    },
    4: {
        "shard": {"shard": 4},
        "copies": {"data": 2, "shard": 2},
        "tensor": {"data": 2, "tensor": 2},
        "both": {"shard": 2, "tensor": 2},
        "texts": {"context": 2, "tensor": 2},
        "stages": {"data": 2, "pipeline": 2},
        "layers": {"pipeline": 2, "shard": 2},
        "heads of layers": {"pipeline": 2, "tensor": 2},
        "gpipe": {"pipeline": 2, "shard": 2, "pipeline_schedule": "gpipe"},
        "interleaved": {"pipeline": 2, "shard": 2, "stages": 2},
    },
    8: {
        "copies of stages": {"data": 2, "pipeline": 2, "shard": 2},
        "three ways": {"pipeline": 2, "shard": 2, "tensor": 2},
    },
}[PROCESSES]
"""Those of so many processes, by name."""

MOVED = {"shard": 2} if PROCESSES == 2 else {"pipeline": 2, "shard": 2}
"""That of a run with which one process goes on."""

STAGED = MOVED if PROCESSES > 2 else {"pipeline": 2}
"""That of a run whose optimizer keeps numbers that are no tensors, of each stage its own."""

TAKEN_UP = [mesh for mesh in MESHES if mesh != "interleaved"]
"""Those that go on with the run of one process."""

MOST = {"decoder", "encoder_decoder", "experts"}
"""Those in which most can go wrong."""

LEFT_OUT: dict[str, Collection[str]] = {
    "shard": {"heads", "shaw", "frozen", "untied"},
    "tensor": {"heads", "shaw", "frozen"},
    "context": {"heads", "frozen", "untied"},
    "pipeline": {"heads", "shaw", "frozen", "untied", "projected"},
    "gpipe": KINDS.keys() - MOST,
    "interleaved": KINDS.keys() - {"encoder_decoder"},  # others have fewer layers than there are stages
    "copies of stages": KINDS.keys() - MOST,
    "three ways": KINDS.keys() - MOST,
}
"""What two processes need not do, for it is asked for by `EXTRA` or on another mesh; and other schedules."""

UNSUITED = {"reversible": {"tensor", "pipeline"}, "projected": {"tensor"}}
"""Along which dimensions a kind is refused, as below."""

RUNS = [
    (mesh, kind)
    for mesh, sizes in MESHES.items()
    for kind in KINDS
    if not (kind in LEFT_OUT.get(mesh, ()) and (PROCESSES == 2 or "pipeline" in sizes))
    and not sizes.keys() & UNSUITED.get(kind, set())
]

EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "accumulated": ("decoder", {"accumulate": 2}),
    "recomputed": ("heads", {"recompute": True}),
    "muon": ("decoder", {"optimizer": "muon"}),
    "averaged": ("frozen", {"optimizer": "sgd", "lr": 0.3, "final": "average"}),
}

ALSO = [
    (mesh, name)
    for mesh in MESHES
    for name in EXTRA
    if mesh not in ("context", "texts", "pipeline", "gpipe", "interleaved")
    and PROCESSES < 8
    and (PROCESSES > 2 or (name == "recomputed") == (mesh == "tensor"))
]
"""Which of them on which mesh."""

HALF: dict[str, Any] = {"precision": "bf16"}
"""In how many bits products are, of float32 weights, on every mesh."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "num_key_value_heads 1 does not divide by tensor": ("one key head", {}),
    "reversible block is not divided by heads": ("reversible", {}),
    "mechanism 'linformer' is not divided by heads": ("linformer", {}),
    "intermediate_size 23 does not divide by tensor": ("odd", {}),
    "'Deberta' change the scores of whole groups": ("deberta", {}),
    "a memory is not divided": ("memory", {}),
    "precision: 'fp16'": ("decoder", {"precision": "fp16"}),
    "optimizer: 'adafactor'": ("encoder", {"optimizer": "adafactor"}),
}
"""What a run with tensor parallelism is refused for, by what is said."""


def settings(mesh: dict[str, int], how: dict[str, Any]) -> dict[str, Any]:
    """Options of a run that takes as many batches a step on every mesh as there are processes."""
    sharing = math.prod(mesh.get(name, 1) for name in ("tensor", "context", "pipeline"))
    return {**how, "mesh": mesh, "accumulate": how.get("accumulate", 1) * sharing}


def both_processes(folder: Path) -> None:
    """What each process runs."""
    torch.set_num_threads(1)
    for mesh, kind in RUNS:
        out = folder / mesh / kind
        write(out, *run(out, kind, **settings(MESHES[mesh], {})))
    for mesh, name in ALSO:
        kind, how = EXTRA[name]
        write(folder / mesh / name, *run(folder / mesh / name, kind, **settings(MESHES[mesh], how)))
    for mesh in TAKEN_UP:
        run(folder / mesh / "half", "decoder", **settings(MESHES[mesh], HALF))
    said = []
    for number, (kind, how) in enumerate(REFUSED.values()):
        with pytest.raises(InputError) as caught:
            run(folder / "refused" / str(number), kind, mesh={"tensor": 2}, **how)
        said.append(str(caught.value))
    (folder / f"refused-{os.environ['RANK']}").write_text("\n".join(said))
    drawn_late()
    unwritable(folder)
    for mesh in ({"shard": PROCESSES}, {"data": PROCESSES}):
        run(folder / "dropped" / next(iter(mesh)), "dropped", mesh=mesh, optimizer="sgd", lr=0.3)
    check_vocabulary()
    undone(folder / "undone")
    run(folder / "moved", "decoder", steps=2, **settings(MOVED, {"background": True}))
    staged = {**EXTRA["muon"][1], **settings(STAGED, {})}
    run(folder / "staged", "decoder", steps=2, **staged)
    write(folder / "staged", *run(folder / "staged", "decoder", resume=True, **staged))
    for mesh in TAKEN_UP:
        out = folder / f"taken up by {mesh}"
        write(out, *run(out, "decoder", resume=True, **settings(MESHES[mesh], {})))


def drawn_late() -> None:
    """Weights that are drawn part by part are those of models that are built whole, on every mesh."""
    for mesh, kind in ((mesh, kind) for mesh, kind in RUNS if mesh != "copies"):
        left_out = "preset", "frozen", "length"
        chosen = {name: value for name, value in KINDS[kind].items() if name not in left_out}
        torch.manual_seed(7)
        whole = create_model(KINDS[kind]["preset"], **chosen)
        torch.manual_seed(7)
        with deferred_initialization():
            model = create_model(KINDS[kind]["preset"], **chosen)
        draw = deferred_draw(model, model.config.initializer_range)
        there = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
        assert 10 * there < sum(parameter.numel() for parameter in model.parameters()), kind
        engine = open_engine(EngineConfig(device="cpu", parallel=ParallelConfig(**MESHES[mesh])))
        engine.place_model(model, Texts(), draw)
        expected, own = whole.state_dict(), model.state_dict()
        divides = "pipeline" in MESHES[mesh]
        assert own.keys() < expected.keys() if divides else own.keys() == expected.keys(), (mesh, kind)
        for name, tensor in own.items():
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(tensor, expected[name]), f"{mesh}, {kind}: {name}"
        assert divides or len({*model.parameters()}) == len({*whole.parameters()}), (mesh, kind)


def unwritable(folder: Path) -> None:
    """All processes hear that the first cannot write the whole model."""
    model = build("shaw")
    apply_fsdp(model, init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("shard",)))
    (folder / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*model.safetensors: .*"):
        gather_full_state_dict(folder / "file" / "model.safetensors", model, gather_tensor)


def undone(out: Path) -> None:
    """All processes hear that the last cannot write its part of a checkpoint in the background."""
    plain = sharded_files.write_shards

    def fails(folder: Path, *arguments: Any) -> None:
        if "step-00000004" in str(folder) and dist.get_rank() == PROCESSES - 1:
            folder = folder / "file"
            folder.write_text("")
        plain(folder, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_files, "write_shards", fails)
        with pytest.raises(InputError, match=r"cannot write .*step-00000004: "):
            run(out, "decoder", steps=4, mesh={"shard": PROCESSES}, background=True)
    dist.barrier()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]


def write(out: Path, model: torch.nn.Module, result: object) -> None:
    """The final weights, which the first process has in memory, and those of them that the run wrote."""
    if os.environ.get("RANK", "0") != "0":
        assert all(parameter.is_meta for parameter in model.parameters())
        return
    if not (out / FINAL).exists():
        write_tensors(out / FINAL, model.state_dict())
    again = out / "again.safetensors"
    write_tensors(again, model.state_dict())
    assert again.read_bytes() == (out / FINAL).read_bytes()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where two processes left their runs; that in "taken up" was begun by one."""
    folder = tmp_path_factory.mktemp("divided")
    for mesh in TAKEN_UP:
        run(folder / f"taken up by {mesh}", "decoder", steps=2, accumulate=PROCESSES)
    ended = torchrun(__file__, folder, processes=PROCESSES, timeout=150 * PROCESSES)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[:6000]
    gather_tensor = "the layers of decoder are gathered all at once: a reversible stack"
    assert gather_tensor in ended.stdout or ("shard", "reversible") not in RUNS
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by one process: a folder by kind, and by what else is done."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {kind: (kind, {}) for kind in KINDS} | EXTRA | {"half": ("decoder", HALF)}
    for name, (kind, how) in runs.items():
        accumulate = PROCESSES * how.get("accumulate", 1)
        write(folder / name, *run(folder / name, kind, **{**how, "accumulate": accumulate}))
    return folder


def test_several_processes_compute_what_one_does(launched: Path, alone: Path):
    differences = {run: difference(alone / run[1], launched / run[0] / run[1]) for run in RUNS}
    assert not {run: number for run, number in differences.items() if not number < 1e-10}


@pytest.mark.parametrize("mesh", MESHES)
def test_who_shares_texts_in_training_shares_those_of_evaluations(mesh: str, launched: Path):
    others = read_metrics(launched / mesh / "encoder_decoder")[-1]["valid_others"]
    assert (others > 0) == (MESHES[mesh].get("context", 1) > 1)


@pytest.mark.parametrize(("mesh", "name"), ALSO)
def test_whatever_else_is_chosen(mesh: str, name: str, launched: Path, alone: Path):
    assert difference(alone / name, launched / mesh / name) < 1e-10


@pytest.mark.parametrize("mesh", TAKEN_UP)
def test_products_in_bfloat16_differ_by_their_rounding(mesh: str, launched: Path, alone: Path):
    """Sums are split otherwise, and each part is rounded to 8 bits: losses and norms agree to 2^-8."""
    assert metric_difference(alone / "half", launched / mesh / "half") < 2**-8
    assert metric_difference(alone / "decoder", alone / "half") > 1e-6, "float64"


def test_a_model_that_is_indivisible_is_refused_in_every_process_before_a_file_is_written(launched: Path):
    for rank in range(PROCESSES):
        said = (launched / f"refused-{rank}").read_text().splitlines()
        assert len(said) == len(REFUSED)
        for expected, complaint in zip(REFUSED, said):
            assert expected in complaint
    assert {path.name for path in (launched / "refused").rglob("*") if path.is_file()} <= {".lock"}


def test_processes_that_leave_out_other_layers_divide_the_weights_or_copy_them(launched: Path):
    assert difference(launched / "dropped" / "shard", launched / "dropped" / "data") < 1e-10


def test_a_plain_run_goes_on_where_a_divided_one_left(launched: Path, alone: Path):
    path = Checkpoints(launched / "moved").latest()
    assert path is not None
    assert len(list((path / "model").glob("shard-*"))) == PROCESSES
    write(launched / "moved", *run(launched / "moved", "decoder", resume=True, accumulate=PROCESSES))
    assert difference(alone / "decoder", launched / "moved") < 1e-10


def test_a_pipeline_goes_on_with_all_that_its_optimizers_keep(launched: Path, alone: Path):
    assert difference(alone / "muon", launched / "staged") < 1e-10


@pytest.mark.parametrize("mesh", TAKEN_UP)
def test_a_divided_run_goes_on_where_a_plain_one_left(mesh: str, launched: Path, alone: Path):
    assert difference(alone / "decoder", launched / f"taken up by {mesh}") < 1e-10


if __name__ == "__main__":
    both_processes(Path(sys.argv[1]))
