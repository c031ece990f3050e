"""The public Routing Transformer computes what ours does, where both see every key."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.bench.benchmark_case import AbsentError, Attention, BenchmarkCase
from polyformer.bench.contenders import PEERS, _ours


def case(text: str, causal: bool = False) -> BenchmarkCase:
    return BenchmarkCase(text, "routing-transformer", 48, 2, 2, 8, True, "cpu", "float64", causal)


def results(attention: Attention) -> list[Tensor]:
    """The output and the gradients for normed queries and keys: its scores are not normed."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, 2, 48, 8, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)
    ]
    q, k = (F.layer_norm(x, (8,), eps=0.0) for x in inputs[:2])
    y = attention(q, k, inputs[2])
    return [y.detach(), *torch.autograd.grad(y.square().sum(), inputs)]


def test_with_one_cluster_it_is_ours():
    pytest.importorskip("routing_transformer")
    bench_case = case("routing(local_heads=0, clusters=1, window=48)")
    for theirs, own in zip(results(PEERS["routing-transformer"](bench_case)), results(_ours(bench_case))):
        assert (theirs - own).norm() < 1e-4 * own.norm()  # it divides by 1 + 1e-5


@pytest.mark.parametrize("text", ["Window(4)", "routing", "routing(local_heads=1)"])
def test_what_it_has_not_is_said(text: str):
    with pytest.raises(AbsentError, match="it has routing"):
        PEERS["routing-transformer"](case(text))
