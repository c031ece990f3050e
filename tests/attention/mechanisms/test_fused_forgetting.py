"""Forgetting attention by flash-linear-attention's kernel: which calls run it.

`test_fused_scan.py` compares its numbers in Triton's interpreter, at night.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyformer
from polyformer.attention.mechanisms import forgetting, fused_forgetting
from polyformer.attention.mechanisms.fused_forgetting import KERNEL, GatedCall, explained, refusal
from polyformer.attention.mechanisms.recurrence.fused_scan import WIDEST
from polyformer.core.sequence.context import Context


def call(
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    queries: int = 9,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> GatedCall:
    """A call without memory; fake tensors need no GPU."""
    with FakeTensorMode():
        q = torch.zeros(2, 4, queries, width, device=device, dtype=dtype)
        k = torch.zeros(2, 2, 9, width, device=device, dtype=dtype)
        gates = torch.zeros(2, 4, 9, device=device)
    return GatedCall(q, k, k, gates, Context(queries, 9, **{"causal": True, **(changes or {})}), **options)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with all packages."""
    monkeypatch.setattr(fused_forgetting, "missing_package", lambda: None)


@pytest.mark.usefixtures("packages")
def test_whole_texts_and_documents_run_the_kernel_on_a_gpu():
    doc = torch.tensor([[0] * 4 + [1] * 5] * 2)
    for texts in (call(), call(changes={"q_doc": doc, "kv_doc": doc}), call(dtype=torch.float32)):
        assert refusal(texts) is None
        assert explained("auto", texts) == KERNEL
    assert "backend='tiled'" in explained("tiled", call())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a CPU": ({"device": "cpu"}, "are for GPUs"),
    "float64": ({"dtype": torch.float64}, "float64"),
    "wide heads": ({"width": WIDEST + 1}, "257 numbers"),
    "an encoder": ({"changes": {"causal": False}}, "causal"),
    "padding": ({"changes": {"kv_valid": torch.ones(2, 9, dtype=torch.bool)}}, "padding"),
    "a cache": ({"queries": 1}, "whole texts"),
    "terms": ({"has_terms": True}, "positions add terms"),
    "dropout": ({"dropout": 0.1}, "dropout"),
}


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_other_calls_run_attend_for_a_reason(changes: dict[str, Any], reason: str):
    assert reason in (refusal(call(**changes)) or "")
    assert explained("auto", call(**changes)).startswith("attend: ")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_forgetting, "missing_package", lambda: "fla-core")
    assert refusal(call()) == "fla-core is not installed (pip install polyformer[gpu])"


@pytest.mark.parametrize(
    ("position", "training", "runs"),
    [("rope", False, True), ("rope", True, False), ("alibi", False, False)],
)
def test_a_model_passes_what_the_kernel_needs_to_know(
    position: str, training: bool, runs: bool, monkeypatch: pytest.MonkeyPatch
):
    """Dropout only in training, and terms of positions."""
    options = {"attention": "forgetting(dropout=0.5)", "position": position, "vocab_size": 20}
    model: Any = polyformer.create_model("decoder-tiny", **options).train(training)
    calls: list[GatedCall] = []

    def recorded(each: GatedCall) -> str:
        calls.append(each)
        return "asked"

    monkeypatch.setattr(forgetting, "refusal", recorded)
    model(torch.ones(1, 5, dtype=torch.long))
    assert len(calls) == model.config.decoder.num_hidden_layers
    assert all((not each.has_terms and not each.dropout) == runs for each in calls)


def test_a_model_says_what_computes_it():
    model = polyformer.create_model("decoder-tiny", attention="forgetting")
    lines = polyformer.explain(model).lines
    assert all("forgetting, by attend: the kernels" in line for line in lines.values())
