"""The cache of integers: its rounding, its size, and its operations."""

import pytest
import torch
from torch import Tensor

from polyformer.core.kv_cache import Int8Cache, quantized
from polyformer.core.state import load_state, save_state


def chunk(length: int, seed: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Keys [B, 3, T, 5] and values [B, 3, T, 7]; vectors of different sizes, some of zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(0, 4, (rows, 3, length, 1), generator=generator, dtype=torch.float64)
    return (
        size * torch.randn(rows, 3, length, 5, generator=generator, dtype=torch.float64),
        size.flip(0) * torch.randn(rows, 3, length, 7, generator=generator, dtype=torch.float64),
    )


def rounded(x: Tensor) -> Tensor:
    """Return x with each number rounded on its own to the nearest of the 255 multiples of its step."""
    result = torch.zeros_like(x)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist():
        vector = x[tuple(place)]
        step = vector.abs().max() / 127
        levels = torch.arange(-127, 128, dtype=x.dtype) * step
        for i, number in enumerate(vector):
            result[(*place, i)] = levels[(levels - number).abs().argmin()]
    return result


def assert_holds(cache: Int8Cache, *chunks: tuple[Tensor, Tensor]) -> None:
    for own, expected in zip(cache.pairs(), map(torch.cat, zip(*chunks), [2, 2])):
        torch.testing.assert_close(own, rounded(expected), atol=1e-12, rtol=0)
    assert cache.held == sum(keys.shape[2] for keys, _ in chunks)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_number_is_off_by_half_a_step_at_most(dtype):
    x = chunk(20, 0)[0].to(dtype)
    integers, scale = quantized(x)
    assert integers.dtype == torch.int8
    assert scale.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(integers.abs().amax(-1), 127 * (scale.squeeze(-1) > 0))
    error = (x.to(scale.dtype) - integers * scale).abs()
    assert (error <= 0.5 * scale * (1 + 1e-4)).all()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 1, 70, 1)])
def test_appended_vectors_are_rounded(lengths, grad):
    chunks = [chunk(length, seed) for seed, length in enumerate(lengths)]
    cache = Int8Cache.empty(0)
    with torch.set_grad_enabled(grad):
        for number, pair in enumerate(chunks, 1):
            keys, values, cache = cache.append(*pair)
            assert_holds(cache, *chunks[:number])
            assert all(map(torch.equal, (keys, values), cache.pairs()))


@torch.no_grad()
def test_a_fork_changes_neither_branch_nor_trunk():
    trunk_chunk, left_chunk, right_chunk = chunk(5, 0), chunk(2, 1), chunk(1, 2)
    trunk = Int8Cache.empty(100).append(*trunk_chunk)[2]
    left, right = trunk.append(*left_chunk)[2], trunk.append(*right_chunk)[2]
    assert_holds(trunk, trunk_chunk)
    assert_holds(left, trunk_chunk, left_chunk)
    assert_holds(right, trunk_chunk, right_chunk)


@torch.no_grad()
def test_rows_and_last_tokens_are_chosen():
    first, second, index = chunk(5, 0), chunk(3, 1), torch.tensor([1, 0, 1])
    cache = Int8Cache.empty(0).append(*first)[2].append(*second)[2]
    shorter = cache.truncated_(3)
    assert shorter is not None
    assert_holds(shorter, first)
    rows = first[0][index], first[1][index]
    copied = shorter.reorder(index)
    assert_holds(copied, rows)
    for _ in range(2):  # into the spare buffers, and back
        rows, copied = (rows[0][index], rows[1][index]), copied.reorder_(index)
        assert_holds(copied, rows)


@torch.no_grad()
def test_keys_of_single_heads_are_gathered():
    pair, index = chunk(9, 0), torch.tensor([[[0, 3], [1, 2], [7, 8]], [[4, 5], [0, 8], [2, 6]]])
    cache = Int8Cache.empty(20).append(*pair)[2].gathered(index)
    assert_holds(cache, tuple(x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in pair))
    assert cache.truncated_(1) is None


@torch.no_grad()
def test_a_saved_cache_has_a_quarter_of_the_bytes(tmp_path):
    keys, values = (torch.randn(1, 3, 100, 64) for _ in range(2))
    cache = Int8Cache.empty(300).append(keys, values)[2]
    save_state(cache, tmp_path / "cache")
    again = load_state(tmp_path / "cache")
    assert all(map(torch.equal, again.pairs(), cache.pairs()))
    tensors = [again.integers.keys, again.integers.values, again.scales.keys, again.scales.values]
    assert sum(x.nbytes for x in tensors) / (keys.nbytes + values.nbytes) == (64 + 4) / 256
