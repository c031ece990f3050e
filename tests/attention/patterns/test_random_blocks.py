"""Random blocks: the same for any length and padding, mutual, evenly drawn, with no global generator."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer.attention.patterns import Padding, PerHead, Random
from polyformer.attention.patterns.blocks import draws
from polyformer.attention.patterns.layout import count
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context, positions_from_mask


def mask(pattern, context: Context, head: int = 0) -> Tensor:
    """[Tq, Tk] of one head of the first batch row."""
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.full((1, 1, 1, 1), head)
    q_idx, kv_idx = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    return pattern.mask(context, b, h, q_idx, kv_idx).expand(1, 1, -1, -1)[0, 0]


def test_a_block_sees_what_it_drew_and_who_drew_it():
    """Both written out from the draws of single numbers, which the tensors must repeat."""
    number = 12
    expected = torch.zeros(number, number, dtype=torch.bool)
    for i in range(number):
        for j in draws(3, 7, i):
            expected[i, j] = True
    length = number * 5
    blocks = mask(Random(3, 5, seed=7), Context(length, length, causal=True))[::5, ::5]
    assert torch.equal(blocks, expected)
    whole = mask(Random(3, 5, seed=7), Context(length, length))
    assert torch.equal(whole, (expected | expected.T).repeat_interleave(5, 0).repeat_interleave(5, 1))


def test_draws_are_different_earlier_blocks():
    for block in range(200):
        drawn = draws(3, 0, block)
        assert len(set(drawn)) == len(drawn) == min(3, block)
        assert all(0 <= earlier < block for earlier in drawn)


def test_every_choice_is_equally_likely():
    """20 choices of 3 of 6 blocks in 4000 seeds: each within 5 standard deviations of 200."""
    counts = Counter(tuple(sorted(draws(3, seed, 6))) for seed in range(4000))
    assert len(counts) == 20
    assert all(abs(times - 200) < 70 for times in counts.values())


def test_extending_a_text_changes_nothing():
    pattern = Random(2, 3, seed=1)
    longer, shorter = mask(pattern, Context(60, 60)), mask(pattern, Context(25, 25))
    assert torch.equal(longer[:25, :25], shorter)


def test_padding_changes_nothing():
    pattern = Random(2, 3, seed=1)
    valid = torch.tensor([[0] * 7 + [1] * 20 + [0] * 4]).bool()
    positions = positions_from_mask(valid)
    context = Context(31, 31, q_pos=positions, kv_pos=positions, kv_valid=valid)
    assert torch.equal(mask(pattern & Padding(), context)[7:27, 7:27], mask(pattern, Context(20, 20)))


def test_random_blocks_reach_past_the_first_1024_tokens():
    """Not so in the published code, whose plan was made for one length."""
    context = Context(1 << 14, 1 << 14)
    reached = set()
    for start in range(1 << 13, 1 << 14, 64):
        for first, _ in Random(3, 64).keys(context, start, start + 64).some:
            reached.add(first // 1024)
    assert reached == set(range(16))


@pytest.mark.parametrize("causal", [False, True])
def test_how_many_keys_a_query_sees(causal: bool):
    """The docstring's numbers: blocks * size in a decoder, and twice that on average in an encoder."""
    length = 1 << 14
    context = Context(length, length, causal=causal)
    widths = []
    for start in range(0, length, 64):
        keys = Random(3, 64).keys(context, start, start + 64)
        assert keys.full == keys.some
        widths.append(count(keys.some) / 64)
    if causal:
        assert widths == [min(i, 3) for i in range(256)]
    else:
        assert sum(widths) / 256 == 2 * 3 * (1 - 1 / 128)  # the first three blocks draw 0, 1 and 2
        assert max(widths) < 40


def test_no_generator_is_touched():
    before = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].copy(),
    )
    draws.cache_clear()
    first = mask(Random(3, 2), Context(50, 50))
    torch.manual_seed(0)
    assert torch.equal(mask(Random(3, 2), Context(50, 50)), first)
    torch.set_rng_state(before[0])
    mask(Random(3, 2), Context(50, 50))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], before[2])


def test_heads_of_other_seeds_see_other_blocks():
    context = Context(90, 90)
    heads = PerHead((Random(2, 3, 0), Random(2, 3, 1)))
    assert not torch.equal(mask(heads, context, 0), mask(heads, context, 1))
    assert torch.equal(mask(heads, context, 1), mask(Random(2, 3, 1), context))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Random(0), "Random: blocks: expected 1 to 256, got 0"),
        (lambda: Random(1, 0), "Random: size: expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str):
    with pytest.raises(InputError, match=message):
        make()
