"""Windows in a sorted order, and attention over them."""

import itertools

import pytest
import torch
from torch import Tensor

from attention_cases import LargestTensor, random_context
from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.lsh import sorted_attention as engine
from polyformer.attention.mechanisms.lsh import sorted_window
from polyformer.attention.mechanisms.lsh.sorted_attention import sorted_attention
from polyformer.attention.mechanisms.lsh.sorted_window import Windows, bucket_windows
from polyformer.core.sequence.context import Context


def counted(buckets: Tensor, size: int, context: Context) -> Tensor:
    """Who sees whom [B, H, R, T, T], from the words alone."""
    *rows, length = buckets.shape
    seen = torch.zeros(*rows, length, length, dtype=torch.bool)
    for place in itertools.product(*map(range, rows)):
        b = place[0]
        for i in range(length):
            seen[(*place, i, i)] = True
            steps = (-1,) if context.causal else (-1, 1)
            for step in steps:
                left = size - 1
                for j in range(i + step, length if step > 0 else -1, step):
                    if mine(buckets[place], context, b, i, j) and left:
                        seen[(*place, i, j)] = True
                        left -= 1
    return seen


def mine(buckets: Tensor, context: Context, b: int, i: int, j: int) -> bool:
    valid, doc = context.kv_valid, context.kv_doc
    real = valid is None or bool(valid[b, i] & valid[b, j])
    return real and bool(buckets[i] == buckets[j]) and (doc is None or bool(doc[b, i] == doc[b, j]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 3, 30])
def test_windows_are_the_last_keys_of_a_bucket(size: int, causal: bool) -> None:
    torch.manual_seed(0)
    for documents, padding in itertools.product([False, True], repeat=2):
        context = random_context(2, 23, 23, causal=causal, documents=documents, padding=padding)
        buckets = torch.randint(0, 3, (2, 2, 2, 23))
        windows = bucket_windows(buckets, size, context)
        seen = windows.sees(windows.spots.unsqueeze(-1), windows.spots.unsqueeze(-2))
        assert torch.equal(seen, counted(buckets, size, context))
        assert torch.equal(windows.order.sort(-1).values, torch.arange(23).expand_as(windows.order))
        in_order = windows.spots.gather(-1, windows.order)
        assert (in_order.diff(dim=-1) > 0).all()


SCALE = 0.3


def inputs(
    length: int, rounds: int, buckets: int, heads: int = 2
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 5)
    )
    return (q, k, v), torch.randint(0, buckets, (2, heads, rounds, length))


def plainly(q: Tensor, k: Tensor, v: Tensor, windows: Windows, context: Context) -> Tensor:
    spots = windows.spots
    seen = windows.sees(spots.unsqueeze(-1), spots.unsqueeze(-2)).any(2)
    own = torch.eye(q.shape[2], dtype=torch.bool)
    others = seen & ~own
    seen = others | (own & ~others.any(-1, keepdim=True))
    out = (q @ k.mT * SCALE).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    return out if context.kv_valid is None else out * context.kv_valid[:, None, :, None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "size", "rounds"), [(13, 1, 1), (201, 5, 3), (301, 40, 2), (150, 200, 2)])
def test_sorted_attention_is_a_masked_softmax(length: int, size: int, rounds: int, causal: bool):
    tensors, buckets = inputs(length, rounds, buckets=4)
    for documents, padding in itertools.product([False, True], repeat=2):
        context = random_context(2, length, length, causal=causal, documents=documents, padding=padding)
        windows = bucket_windows(buckets, size, context)
        results = []
        for y in (
            sorted_attention(Heads(*tensors), windows, context, SCALE),
            plainly(*tensors, windows, context),
        ):
            weight = torch.arange(y.numel()).view_as(y).cos()
            results.append((y, *torch.autograd.grad((y * weight).sum(), tensors)))
        for actual, expected in zip(*results):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("few", [1, 5000, 1 << 24])
def test_parts_do_not_show_in_the_result(few: int, monkeypatch: pytest.MonkeyPatch):
    """A few blocks at a time, each head alone, or all together: one result."""
    tensors, buckets = inputs(150, rounds=2, buckets=3)
    context = Context(150, 150, causal=True)
    windows = bucket_windows(buckets, 33, context)
    expected = sorted_attention(Heads(*tensors), windows, context, SCALE)
    for module in (sorted_window, engine):
        monkeypatch.setattr(module, "cache_capacity", lambda like: few)
    actual = sorted_attention(Heads(*tensors), windows, context, SCALE)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_no_table_of_all_pairs_is_made():
    length = 3000
    tensors, buckets = inputs(length, rounds=2, buckets=100, heads=1)
    context = Context(length, length, causal=True)
    with LargestTensor() as largest:
        sorted_attention(Heads(*tensors), bucket_windows(buckets, 32, context), context, SCALE)
    assert largest.largest < length * 300


def test_weights_of_large_scores_sum_to_one_in_gradients():
    """Scores of 1e8 and more: float32 has steps of 8 and more there."""
    _, buckets = inputs(70, rounds=2, buckets=2)
    context = Context(70, 70, causal=True)
    windows = bucket_windows(buckets, 9, context)
    q = torch.full((2, 2, 70, 6), 1e4)
    v = torch.randn(2, 2, 70, 5, requires_grad=True)
    sorted_attention(Heads(q, q, v), windows, context, SCALE).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad.sum((2, 3)), torch.full((2, 2), 70.0 * 5), rtol=1e-4, atol=0)


def test_large_and_equal_scores_stay_finite():
    tensors, buckets = inputs(70, rounds=2, buckets=2)
    q, k, v = (x.detach().float() for x in tensors)
    context = Context(70, 70, causal=True)
    windows = bucket_windows(buckets, 9, context)
    y = sorted_attention(Heads(q * 1e4, k * 1e4, v), windows, context, SCALE)
    assert y.isfinite().all()
    assert y.abs().max() <= v.abs().max() * 1.001
