"""Patterns between a target and its source equal their equations, forward and backward, in every backend."""

import math

import pytest
import torch
from torch import Tensor

from polyformer import InputError
from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.patterns import Aligned, Full, Pattern, PerHead, SourceSpans, WaitK, Window
from polyformer.attention.patterns.between_sequences import check_between_sequences, check_within_sequence
from polyformer.attention.patterns.layout import count
from polyformer.core.sequence.context import Context

ROWS, TARGET, SOURCE = 3, 23, 41
PATTERNS = [Aligned(1.7, 3, 2), Aligned(1 / 3, 0, 1), WaitK(4), WaitK(1, 1.7), Aligned(2, 5, 5) & WaitK(3)]


def naive(pattern: Pattern, i: int, j: int, length: int) -> bool:
    """Return whether target position i sees position j of a source of `length` tokens, by the equations."""
    if isinstance(pattern, Aligned):
        center = min(math.floor(pattern.ratio * i + 0.5), length - 1)
        return center - pattern.left <= j <= center + pattern.right
    if isinstance(pattern, WaitK):
        return j < min(pattern.k + math.floor(pattern.ratio * i), length)
    return all(naive(part, i, j, length) for part in (pattern.left, pattern.right))  # type: ignore[attr-defined]


def padded(start: int, left: list[int], right: list[int]) -> tuple[Context, Tensor]:
    """Return a call of queries from position `start` on, with padding of the source, and its source mask."""
    slots = torch.arange(SOURCE)
    valid = (slots >= torch.tensor(left).view(-1, 1)) & (slots < SOURCE - torch.tensor(right).view(-1, 1))
    target = Context(TARGET, start + TARGET, causal=True)
    return Context(TARGET, SOURCE, kv_valid=valid).between_positions(target, None), valid


@pytest.mark.parametrize("backend", ["definition", "tiled", "sdpa"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_attention_is_softmax_over_the_keys_of_the_equation(pattern: Pattern, backend: str):
    torch.manual_seed(0)
    context, valid = padded(5, left=[0, 7, 0], right=[0, 0, 13])
    mask = torch.zeros(ROWS, 1, TARGET, SOURCE, dtype=torch.bool)
    for row in range(ROWS):
        length = int(valid[row].sum())
        slots = valid[row].nonzero().flatten().tolist()
        for i in range(TARGET):
            for j, slot in enumerate(slots):
                mask[row, 0, i, slot] = naive(pattern, i + 5, j, length)
    q = torch.randn(ROWS, 2, TARGET, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(ROWS, 2, SOURCE, 6, dtype=torch.float64, requires_grad=True) for _ in "kv")
    scores = (q @ k.mT / math.sqrt(6)).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0) @ v
    actual = attend(q, k, v, pattern=pattern, context=context, backend=backend)
    torch.testing.assert_close(actual, expected)
    loss = torch.randn_like(expected)
    for ours, naive_gradient in zip(
        torch.autograd.grad(actual, (q, k, v), loss), torch.autograd.grad(expected, (q, k, v), loss)
    ):
        torch.testing.assert_close(ours, naive_gradient.nan_to_num(0))


@pytest.mark.parametrize("backend", ["tiled", "sdpa"])
def test_stated_spans_are_the_keys(backend: str):
    torch.manual_seed(0)
    first = torch.randint(0, SOURCE, (ROWS, TARGET))
    last = (first + torch.randint(-1, 9, first.shape)).clamp_max(SOURCE - 1)  # some see nothing
    slots = torch.arange(SOURCE)
    mask = (slots >= first.unsqueeze(-1)) & (slots <= last.unsqueeze(-1))
    q, k, v = torch.randn(ROWS, 2, TARGET, 6), *torch.randn(2, ROWS, 2, SOURCE, 6).unbind()
    expected = attend(
        q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: mask[b, q_idx, kv_idx], backend="definition"
    )
    context = Context(TARGET, SOURCE, q_start=0, q_spans=torch.stack([first, last], 1))
    torch.testing.assert_close(
        attend(q, k, v, pattern="SourceSpans()", context=context, backend=backend), expected
    )
    for row in SourceSpans().layout(context, 5):
        needed = torch.zeros(SOURCE, dtype=torch.bool)
        for start, stop in row.keys.some:
            needed[start:stop] = True
        assert not (mask[:, row.start : row.stop] & ~needed).any()


def test_a_ratio_is_not_subject_to_rounding():
    """0.1 * 3 is more than 0.3 in floating point, and 0.29 * 100 less than 29."""
    context = Context(101, 60, q_start=0)
    _, last = WaitK(1, 0.29).spans(context, torch.device("cpu"))
    assert last[100] == 29
    first, _ = Aligned(1 / 3, 0, 0).spans(context, torch.device("cpu"))
    assert first.tolist() == [(2 * i + 3) // 6 for i in range(101)]


def test_a_long_source_is_computed_in_blocks():
    context = Context(2000, 16000, q_start=0)
    rows = Aligned(8.0, 64, 64).layout(context, 64)
    computed = sum((row.stop - row.start) * count(row.keys.some) for row in rows)
    assert computed < 0.05 * 2000 * 16000
    assert any(row.keys.full for row in WaitK(3, 8.0).layout(context, 64))
    q, kv = torch.empty(1, 1, 2000, 8), torch.empty(1, 1, 16000, 8)
    assert explain(q, kv, kv, pattern="Aligned(8.0, 64, 64)").backend == "tiled"


def test_without_a_context_both_sequences_begin_at_0():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 5, 4), *torch.randn(2, 1, 2, 9, 4).unbind()
    expected = attend(q, k, v, pattern=Aligned(1.0, 0, 1), context=Context(5, 9, q_start=0))
    assert torch.equal(attend(q, k, v, pattern="Aligned(1.0, 0, 1)"), expected)
    torch.testing.assert_close(attend(q[:, :, :1], k, v, pattern="WaitK(1)"), v[:, :, :1])


def test_patterns_have_a_place():
    check_between_sequences(PerHead((WaitK(3) | Aligned(1.0, 2, 2), Full())), "cross_attention")
    check_within_sequence(PerHead((Window(3), Full())), "attention")
    with pytest.raises(InputError, match=r"cross_attention: Window\(.*\) is a pattern within one sequence"):
        check_between_sequences(PerHead((WaitK(3), Window(3))), "cross_attention")
    with pytest.raises(InputError, match=r"attention: WaitK\(.*set it as cross_attention"):
        check_within_sequence(PerHead((WaitK(3), Window(3))), "attention")
