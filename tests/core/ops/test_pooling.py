"""Pooling with padding on either side."""

from typing import get_args

import pytest
import torch

from polyformer.core.ops.layers import Pooling, pool

HIDDEN = torch.arange(2 * 4 * 3, dtype=torch.float64).view(2, 4, 3)
MASK = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]]).bool()


@pytest.mark.parametrize(
    ("how", "whole", "masked"),
    [
        ("first", HIDDEN[:, 0], torch.stack([HIDDEN[0, 1], HIDDEN[1, 0]])),
        ("last", HIDDEN[:, 3], torch.stack([HIDDEN[0, 2], HIDDEN[1, 2]])),
        ("mean", HIDDEN.mean(1), torch.stack([HIDDEN[0, 1:3].mean(0), HIDDEN[1, :3].mean(0)])),
    ],
)
def test_real_tokens_only(how: str, whole: torch.Tensor, masked: torch.Tensor):
    assert torch.equal(pool(HIDDEN, None, how), whole)
    torch.testing.assert_close(pool(HIDDEN, MASK, how), masked, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", get_args(Pooling))
def test_a_row_of_padding_is_finite_forward_and_backward(how: str):
    hidden = HIDDEN.clone().requires_grad_()
    pooled = pool(hidden, torch.zeros(2, 4, dtype=torch.bool), how)
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
