"""The key-value cache is a value: what one continuation does, no other sees."""

import pytest
import torch
from torch import Tensor

from polyformer.core.kv_cache import FIRST_CAPACITY, KeyValueCache
from polyformer.core.ranges import RESERVED


def chunk(length: int, seed: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Keys [B, 3, T, 4] and values [B, 3, T, 5]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 3, length, 4, generator=generator, dtype=torch.float64),
        torch.randn(rows, 3, length, 5, generator=generator, dtype=torch.float64),
    )


def held(cache: KeyValueCache) -> tuple[Tensor, Tensor]:
    """What a cache says it holds."""
    assert cache.keys is not None
    assert cache.values is not None
    return cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]


def assert_holds(cache: KeyValueCache, *chunks: tuple[Tensor, Tensor]) -> None:
    keys, values = held(cache)
    assert torch.equal(keys, torch.cat([pair[0] for pair in chunks], 2))
    assert torch.equal(values, torch.cat([pair[1] for pair in chunks], 2))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1, 70, 1), (64, 1), (200, 3)])
def test_appending_joins(lengths, grad):
    chunks = [chunk(length, seed) for seed, length in enumerate(lengths)]
    cache = KeyValueCache()
    with torch.set_grad_enabled(grad):
        for number, pair in enumerate(chunks, 1):
            keys, values, cache = cache.append(*pair)
            assert_holds(cache, *chunks[:number])
            assert torch.equal(keys, held(cache)[0])
            assert torch.equal(values, held(cache)[1])


@torch.no_grad()
def test_a_fork_changes_neither_branch_nor_trunk():
    trunk_chunk, left_chunk, right_chunk, late = chunk(5, 0), chunk(2, 1), chunk(1, 2), chunk(1, 3)
    trunk = KeyValueCache().append(*trunk_chunk)[2]
    left = trunk.append(*left_chunk)[2]
    right = trunk.append(*right_chunk)[2]
    left = left.append(*late)[2]
    assert_holds(trunk, trunk_chunk)
    assert_holds(left, trunk_chunk, left_chunk, late)
    assert_holds(right, trunk_chunk, right_chunk)


@torch.no_grad()
def test_a_line_of_tokens_shares_one_buffer():
    cache = KeyValueCache(reserve=300).append(*chunk(7, 0))[2]
    assert cache.keys is not None
    buffer = cache.keys.data_ptr()
    for seed in range(290):
        cache = cache.append(*chunk(1, seed))[2]
    assert cache.keys is not None
    assert cache.keys.data_ptr() == buffer


@torch.no_grad()
def test_without_a_reserve_the_buffer_doubles():
    cache, buffers = KeyValueCache(), set()
    for seed in range(20 * FIRST_CAPACITY):
        cache = cache.append(*chunk(1, seed))[2]
        assert cache.keys is not None
        buffers.add(cache.keys.shape[2])
    assert len(buffers) <= 6


@torch.no_grad()
def test_a_detached_cache_still_knows_that_the_buffer_is_shared():
    start, more, other = chunk(3, 0), chunk(1, 1), chunk(1, 2)
    cache = KeyValueCache().append(*start)[2]
    first = cache.detach().append(*more)[2]
    second = cache.append(*other)[2]
    assert_holds(first, start, more)
    assert_holds(second, start, other)


@pytest.mark.parametrize("grad", [False, True])
def test_reordering_picks_rows_in_a_buffer_of_their_own(grad):
    start, more = chunk(3, 0), chunk(2, 1, rows=3)
    index = torch.tensor([1, 1, 0])
    with torch.set_grad_enabled(grad):
        cache = KeyValueCache(reserve=100).append(*start)[2]
        picked = cache.reorder(index)
        longer = picked.append(*more)[2]
        again = cache.append(*chunk(2, 5))[2]
    assert_holds(picked, (start[0][index], start[1][index]))
    assert_holds(longer, (start[0][index], start[1][index]), more)
    assert_holds(cache, start)
    assert_holds(again, start, chunk(2, 5))
    assert KeyValueCache().reorder(index).keys is None


@torch.no_grad()
def test_an_owner_reorders_between_two_buffers():
    cache, parts = KeyValueCache(reserve=9), []
    buffers = set()
    for step in range(9):
        parts = [tuple(x[[1, 1, 0]] for x in part) for part in parts] + [chunk(1, step, rows=3)]
        cache = cache.append(*parts[-1])[2]
        assert_holds(cache, *parts)
        cache = cache.reorder_(torch.tensor([1, 1, 0]))
        assert cache.keys is not None
        buffers.add(cache.keys.data_ptr())
    assert len(buffers) == 2
    fewer = cache.reorder_(torch.tensor([2]))
    parts = [tuple(x[[1, 1, 0]][[2]] for x in part) for part in parts]
    assert_holds(fewer, *parts)
    assert_holds(
        fewer.append(*chunk(70, 3, rows=1))[2].reorder_(torch.tensor([0])), *parts, chunk(70, 3, rows=1)
    )


@torch.no_grad()
def test_reordering_keeps_the_room():
    cache = KeyValueCache(reserve=100).append(*chunk(3, 0))[2]
    picked = cache.reorder(torch.tensor([1, 0]))
    for shorter in (picked, cache):
        longer = shorter.append(*chunk(97, 1))[2]
        assert shorter.keys is not None
        assert longer.keys is not None
        assert longer.keys.data_ptr() == shorter.keys.data_ptr()


def test_gradients_reach_keys_of_earlier_calls():
    cache = KeyValueCache()
    chunks = [tuple(tensor.requires_grad_() for tensor in chunk(2, seed)) for seed in range(3)]
    for keys, values in chunks:
        every_key, _, cache = cache.append(keys, values)
        cache = cache.reorder(torch.tensor([1, 0]))
    weights = torch.arange(every_key.numel(), dtype=torch.float64).view_as(every_key)
    (every_key * weights).sum().backward()
    swapped = weights[[1, 0]]
    # The last chunk was joined as it came, the one before after one swap, the first after two.
    expected = [weights[:, :, 0:2], swapped[:, :, 2:4], weights[:, :, 4:6]]
    for (keys, _), gradient in zip(chunks, expected):
        assert torch.equal(keys.grad, gradient)


def test_without_gradients_a_differentiable_past_is_copied_not_overwritten():
    start = tuple(tensor.requires_grad_() for tensor in chunk(2, 0))
    cache = KeyValueCache().append(*start)[2]
    with torch.no_grad():
        longer = cache.append(*chunk(1, 1))[2]
    assert longer.keys is not None
    assert not longer.keys.requires_grad
    assert_holds(cache, start)
    assert held(longer)[0].shape[2] == 3


def test_room_for_many_tokens_is_made_as_they_come():
    """10**9 tokens, which nobody has written yet, would be gigabytes."""
    with torch.no_grad():
        keys, _, cache = KeyValueCache(reserve=10**9).append(*chunk(7, 0))
    assert cache.keys is not None
    assert (keys.shape[2], cache.keys.shape[2]) == (7, RESERVED)
