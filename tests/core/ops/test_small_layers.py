"""Dropout: how many elements, what mean, which gradient, and that a seed repeats it; pooling with padding."""

import math
from typing import get_args

import pytest
import torch

from polyformer.core.ops import layers as module
from polyformer.core.ops.layers import Dropout, DropoutScales, Pooling, dropout, pool, scale


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_share_and_mean(rate: float):
    torch.manual_seed(0)
    x = torch.ones(1000, 333)
    y = dropout(x, rate)
    gone = (y == 0).float().mean().item()
    assert abs(gone - rate) < 5 * math.sqrt(rate * (1 - rate) / x.numel())
    assert y.unique().tolist() == pytest.approx([0.0, scale(rate)])
    assert scale(rate) == pytest.approx(1 / (1 - rate), rel=1e-3)


def test_neighbours_are_independent():
    """Four numbers come from one word: no bit of one says anything of the next."""
    torch.manual_seed(1)
    gone = (dropout(torch.ones(1 << 20), 0.25) == 0).float()
    for lag in (1, 2, 3, 4):
        both = (gone[lag:] * gone[:-lag]).mean().item()
        assert abs(both - 0.0625) < 5 * math.sqrt(0.0625 / len(gone))


@pytest.mark.parametrize("size", [100, 5000])
def test_a_seed_repeats_it_and_the_gradient_has_the_same_holes(size: int):
    x = torch.rand(size, dtype=torch.float64).add(1).requires_grad_()
    torch.manual_seed(2)
    first = dropout(x, 0.3)
    torch.manual_seed(2)
    assert torch.equal(dropout(x, 0.3), first)
    (slope,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(slope * x, first, rtol=1e-12, atol=0)
    assert not torch.equal(dropout(x, 0.3), first)


def test_the_module_does_nothing_in_evaluation_or_at_rate_zero():
    x = torch.rand(10000)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)


@pytest.mark.parametrize("on_device", [False, True])
def test_scales_are_a_function_of_the_seed(on_device: bool, monkeypatch: pytest.MonkeyPatch):
    if on_device:
        monkeypatch.setattr(module, "_generator", lambda device, seed: torch.Generator().manual_seed(seed))
    shapes = [(300, 200), (7,), (300, 200)]

    def scales(seed: int) -> list[torch.Tensor]:
        drawn = DropoutScales(seed)
        return [drawn.next(torch.empty(shape, dtype=torch.float64), 0.25) for shape in shapes]

    first, again, other = scales(1), scales(1), scales(2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(first[0], other[0])
    assert first[0].unique().tolist() == pytest.approx([0.0, 4 / 3], rel=1e-4)
    assert abs(first[0].mean().item() - 1) < 0.02


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
