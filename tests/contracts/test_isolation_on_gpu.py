"""On a GPU padding is isolated without reading a value; here a CPU is treated as a GPU.

Also shows what is not isolated there: tokens that come later, and padding in calls of few queries.
"""

from typing import Any

import pytest
import torch
from selection import mechanisms
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyformer.attention.functional import isolation
from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Window
from polyformer.core.sequence.context import Context

B, H, T, D = 2, 2, 24, 4
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}


class ReadCounter(TorchDispatchMode):
    """Count operations that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.reads.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "is_readable", lambda x: False)
    monkeypatch.setattr(isolation, "is_unreadable_device", lambda x: True)


def inputs(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(3)]


VALID = torch.arange(T) < torch.tensor([[T - 7], [T]])


@pytest.mark.parametrize("backend", ["definition", "sdpa", "tiled"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_padding_reaches_no_query(backend: str, value: float) -> None:
    clean = [x.requires_grad_() for x in inputs()]
    bad = [x.detach().clone() for x in clean]
    for x in bad[1:]:
        x[0, :, T - 7 :] = value
    bad = [x.requires_grad_() for x in bad]
    results = []
    for q, k, v in (clean, bad):
        out = attend(q, k, v, pattern=Window(5), context=Context(T, T, kv_valid=VALID), backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for x, y in zip(*results):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_repeated_calls_of_a_context_are_isolated() -> None:
    context = Context(T, T, kv_valid=VALID)
    with torch.no_grad():
        for seed in range(2):
            q, k, v = inputs(seed)
            expected = attend(q, k, v, context=Context(T, T, kv_valid=VALID))
            k[0, :, -1], v[0, :, -1] = torch.nan, torch.inf
            assert torch.equal(attend(q, k, v, context=context), expected)


@pytest.mark.parametrize(("name", "config"), mechanisms("mechanism"))
def test_padding_reaches_no_query_of_a_mechanism(name: str, config: MechanismConfig) -> None:
    torch.manual_seed(1)
    mechanism = config.build(2, 4).double().eval()
    q, k, v = inputs()
    results = []
    for value in (1.0, torch.nan):
        for x in (q, k, v):
            x[0, :, T - 7 :] = value
        y, _ = mechanism(q, k, v, Context(T, T, kv_valid=VALID), None, None)
        results.append(y[VALID.unsqueeze(1).expand(B, H, T)])
    assert results[0].isfinite().all()
    torch.testing.assert_close(*results)


def test_no_value_is_read() -> None:
    q, k, v = inputs()
    with ReadCounter() as counter:
        attend(q, k, v, context=Context(T, T, kv_valid=VALID), backend="sdpa")
    few = counter.reads
    k[0, :, -1] = torch.nan
    with ReadCounter() as counter:
        attend(q, k, v, context=Context(T, T, kv_valid=VALID), backend="sdpa")
    assert counter.reads == few


def test_what_is_not_isolated() -> None:
    q, k, v = inputs()
    v[:, :, -1] = torch.nan
    later = attend(q, k, v, context=Context(T, T, causal=True), backend="definition")
    assert later[:, :, 0].isnan().all()
    step = attend(
        q[:, :, -1:], k, v, context=Context(1, T, kv_valid=VALID[:1].expand(B, T)), backend="definition"
    )
    assert step.isnan().all()
