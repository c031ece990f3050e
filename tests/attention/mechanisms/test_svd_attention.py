"""SVD attention: equation 6 written out, the best of its rank, padding."""

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig, SVDConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context


def inputs(length: int, key_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        2 * torch.randn(2, heads, length, 4, dtype=torch.float64, requires_grad=True)
        for heads in (2, key_heads, key_heads)
    ]


def run(rank: int, tensors: list[Tensor], context: Context) -> Tensor:
    return SVDConfig(rank=rank).build(2, 4)(*tensors, context, None, None)[0]


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_it_is_the_sum_of_the_greatest_singular_values(rank: int):
    q, k, v = (x.detach().numpy() for x in inputs(9))
    y = run(rank, inputs(9), Context(9, 9)).detach().numpy()
    for b in range(2):
        for h in range(2):
            weights = np.exp(q[b, h] @ k[b, h].T / 2)
            weights /= weights.sum(1, keepdims=True)
            u, s, w = np.linalg.svd(weights)
            low = sum(s[i] * np.outer(u[:, i], w[i]) for i in range(rank))
            np.testing.assert_allclose(y[b, h], low @ v[b, h], rtol=1e-9, atol=1e-11)
            assert np.linalg.norm(low - weights, 2) == pytest.approx(s[rank])


def test_of_full_rank_it_is_attention_with_its_gradients():
    tensors, context = inputs(9, key_heads=1), Context(9, 9)
    expected = SoftmaxConfig().build(2, 4)(*tensors, context, None, None)[0]
    actual = run(9, tensors, context)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    slopes = [torch.autograd.grad(y.square().sum(), tensors) for y in (actual, expected)]
    for ours, theirs in zip(*slopes):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_padding_takes_no_singular_values():
    """Neither what is masked nor how much of it there is."""
    tensors = inputs(9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, :2] = valid[:, 7:] = False
    y = run(2, tensors, Context(9, 9, kv_valid=valid))
    alone = run(2, [x[:, :, 2:7] for x in tensors], Context(5, 5))
    torch.testing.assert_close(y[:, :, 2:7], alone, rtol=1e-10, atol=1e-12)
    assert y[:, :, :2].abs().max() == 0


def test_a_rank_of_nothing_is_refused():
    with pytest.raises(InputError, match="rank: expected 1 or more, got 0"):
        SVDConfig(rank=0)
