"""Recurrences by flash-linear-attention's kernels: which calls run them, and equality in an interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyformer
from polyformer.attention.mechanisms.recurrence import fused_scan
from polyformer.attention.mechanisms.recurrence.fused_scan import (
    WIDEST,
    chosen_scan,
    documents,
    explained,
    refusal,
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, chunked_scan, recurrence
from registered import nightly

SCRIPT = Path(__file__).with_name("interpreted_scans.py")
MEMBERS = "linear", "retention", "gla", "ssd", "delta", "gated_delta", "kda", "gated_delta(steps=2)"


def tokens(
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    channels: int = 1,
    erases: bool = True,
    graph: bool = True,
) -> ScanInputs:
    """Tokens without memory; fake tensors need no GPU."""
    with FakeTensorMode():
        q, k, v = (torch.zeros(2, 4, 100, width, device=device, dtype=dtype) for _ in range(3))
        decay, erase = (torch.zeros(2, 4, 100, size, device=device, dtype=dtype) for size in (channels, 1))
        return ScanInputs(q.requires_grad_(graph), k, v, decay, erase if erases else None)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an A100 and all packages."""
    monkeypatch.setattr(fused_scan, "missing_package", lambda: None)
    monkeypatch.setattr(fused_scan, "capability", lambda device: 8)
    monkeypatch.setattr(fused_scan, "triton_version", lambda: (3, 6, 0))


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("channels", "erases", "kernel"),
    [(1, False, "simple_gla"), (64, False, "gla"), (1, True, "gated_delta_rule"), (64, True, "kda")],
)
def test_every_kind_of_scan_has_its_kernel_on_a_gpu(channels: int, erases: bool, kernel: str):
    scan = tokens(channels=channels, erases=erases)
    assert refusal(scan) is None
    assert explained("auto", scan) == f"flash-linear-attention's {kernel}"
    assert chosen_scan("auto", scan, torch.bfloat16).func is fused_scan.fused_scan  # type: ignore[attr-defined]
    assert chosen_scan("chunks", scan, torch.bfloat16) is chunked_scan
    assert chosen_scan("definition", scan, torch.bfloat16) is recurrence


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a CPU": ({"device": "cpu"}, "are for GPUs"),
    "float64": ({"dtype": torch.float64}, "float64"),
    "wide keys": ({"width": WIDEST + 1}, "257 numbers"),
}


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_calls_run_chunks_for_a_reason(changes: dict[str, Any], reason: str):
    scan = tokens(**changes)
    assert reason in explained("auto", scan)
    assert chosen_scan("auto", scan, torch.float32) is chunked_scan


@pytest.mark.usefixtures("ampere")
def test_a_transform_of_a_call_runs_chunks():
    scan = tokens()
    seen = torch.func.vmap(lambda x: x if refusal(scan) is None else x + 1)(torch.zeros(2))
    assert seen.eq(1).all()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fla" else name)
    fused_scan.missing_package.cache_clear()
    try:
        assert refusal(tokens()) == "fla-core is not installed (pip install polyformer[gpu])"
    finally:
        fused_scan.missing_package.cache_clear()


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(
    ("major", "triton", "issue"),
    [
        (9, (3, 4, 0), "#640"),
        (9, (3, 7, 0), "#640"),
        (9, (3, 7, 1), ""),
        (9, (3, 3, 1), ""),
        (8, (3, 6, 0), ""),
        (10, (3, 8, 0), "#913"),
        (12, (3, 8, 0), "#913"),
    ],
)
def test_wrong_gradients_of_a_gpu_are_avoided(
    major: int, triton: tuple[int, ...], issue: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused_scan, "capability", lambda device: major)
    monkeypatch.setattr(fused_scan, "triton_version", lambda: triton)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert issue in (refusal(tokens()) or "")
    assert bool(refusal(tokens())) == bool(issue)
    assert refusal(tokens(graph=False)) is None, "outputs are right"
    assert refusal(tokens(erases=False)) is None, "the fault is one of the delta rule"


def test_documents_are_counted_across_rows():
    starts = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 1, 1]]).bool()
    bounds, first, last = documents(starts)
    assert bounds.tolist() == [0, 2, 4, 8, 9, 10, 11, 12]
    assert first.tolist() == [0, 2, 3]
    assert last.tolist() == [1, 2, 6]


def test_a_model_says_what_computes_its_recurrences():
    model = polyformer.create_model("decoder-tiny", attention="gated_delta")
    lines = polyformer.explain(model).lines
    assert len(lines) == model.config.decoder.num_hidden_layers
    assert all("gated_delta, by chunks in torch: the kernels" in line for line in lines.values())


def compare(name: str) -> None:
    """Run a comparison in a process of its own: the interpreter changes Triton for all of a process."""
    root = Path(__file__).parents[3]
    # In a folder of their own: with Triton beside it, torch on a CPU would load it in every process.
    packages = Path(sys.prefix, "share", "interpreter")
    paths = [root / "src", root / "tests", *sys.path, packages]
    alone = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, name], env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert reports
    assert {report["case"]: report["difference"] for report in reports if report["difference"] > 1e-5} == {}


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Triton has packages for Linux only")


@LINUX
def test_a_member_by_the_kernels_is_the_member_in_float64():
    compare("member-gated_delta")


@LINUX
@nightly
@pytest.mark.parametrize("name", [f"member-{member}" for member in MEMBERS if member != "gated_delta"])
def test_every_member_by_the_kernels_is_the_member_in_float64(name: str):
    compare(name)


@LINUX
@nightly
@pytest.mark.parametrize(
    "name", ["simple_gla", "gla", "gated_delta_rule", "kda", "none", "delta", "rank_one", "forgetting"]
)
def test_outputs_states_and_gradients_are_those_of_the_scan(name: str):
    compare(name)
