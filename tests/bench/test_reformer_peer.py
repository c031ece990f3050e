"""The public LSH attention takes part where it can: two chunks see each other, which is full attention."""

import pytest
import torch
import torch.nn.functional as F

from polyformer.bench.benchmark_case import AbsentError, BenchmarkCase
from polyformer.bench.contenders import PEERS


def case(text: str, length: int = 48, causal: bool = True) -> BenchmarkCase:
    return BenchmarkCase(text, "reformer-pytorch", length, 2, 2, 8, True, "cpu", "float64", causal)


@pytest.mark.parametrize("causal", [False, True])
def test_with_two_chunks_it_is_full_attention(causal: bool):
    pytest.importorskip("reformer_pytorch")
    torch.manual_seed(0)
    q, v = torch.randn(2, 2, 2, 48, 8, dtype=torch.float64)
    y = PEERS["reformer-pytorch"](case("lsh(rounds=1, window=24)", causal=causal))(q, q, v)
    scores = q @ F.normalize(q, dim=-1).mT / 8**0.5
    scores = scores.masked_fill(torch.eye(48, dtype=torch.bool), -5e4)
    if causal:
        scores = scores.masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(y, scores.softmax(-1) @ v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "why"), [("Window(4)", "it has lsh"), ("lsh(window=7)", "a multiple of 14")]
)
def test_what_it_has_not_it_refuses(text: str, why: str):
    with pytest.raises(AbsentError, match=why):
        PEERS["reformer-pytorch"](case(text))
