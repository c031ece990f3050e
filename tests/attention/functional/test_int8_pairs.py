"""Attention of a single query to integers equals `attend` over the dequantized keys and values."""

import pytest
import torch
from torch import Tensor

from polyformer.attention import attend
from polyformer.attention.functional.int8_pairs import BLOCK, CHUNK, attend_to_integers
from polyformer.attention.patterns import Causal, Full
from polyformer.core.kv_cache import Int8Cache, Int8Pairs
from polyformer.core.recorded_graph import record
from polyformer.core.sequence.context import Context

LENGTHS = [1, BLOCK - 1, 4 * BLOCK, CHUNK + 9]


def call(length: int, heads: int, groups: int) -> tuple[Tensor, Int8Pairs]:
    """Return queries [3, groups * heads, 1, 5], and pairs with keys of width 5 and values of width 7."""
    generator = torch.Generator().manual_seed(length)
    sizes = (heads * groups, 1, 5), (heads, length, 5), (heads, length, 7)
    q, k, v = (torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return q, Int8Cache.empty(0).extended(k, v)[0]


def contexts(length: int) -> dict[str, Context]:
    valid = torch.ones(3, length, dtype=torch.bool)
    valid[1, : length // 2], valid[2, : length - 1] = False, False
    return {
        "plain": Context(1, length, causal=True),
        "padded": Context(1, length, causal=True, kv_valid=valid),
    }


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "padded"])
@pytest.mark.parametrize("pattern", [None, Full(), Causal()], ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(2, 3), (3, 1)])
@pytest.mark.parametrize("length", LENGTHS)
def test_it_is_attend_over_the_dequantized_pairs(length, heads, groups, pattern, name):
    q, pairs = call(length, heads, groups)
    context = contexts(length)[name]
    expected = attend(q, *pairs.dequantized(), pattern=pattern, context=context, scale=0.7)
    y = attend_to_integers(q, pairs, pattern, context, 0.7)
    assert y is not None
    torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "padded"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_recorded_graph_hides_the_slots_after_its_query(length, name):
    """The slot of the query is a tensor, and the same graph serves other slots."""
    q, pairs = call(length, 2, 3)
    valid = contexts(length)[name].kv_valid

    def step(slot: Tensor, *tensors: Tensor) -> tuple[Tensor]:
        context = Context(1, length, causal=True, q_start=slot, kv_valid=valid)  # type: ignore[arg-type]
        y = attend_to_integers(tensors[0], Int8Pairs(*tensors[1:]), None, context, None)
        assert y is not None
        return (y,)

    graph = record(step, [torch.tensor([length - 1]), q, *pairs])
    for slot in {length - 1, length // 2}:
        if valid is not None:
            valid[:, slot] = True  # a query sees its own key
        short = Int8Pairs(*(x[:, :, : slot + 1] for x in pairs))
        seen = None if valid is None else valid[:, : slot + 1]
        context = Context(1, slot + 1, causal=True, kv_valid=seen)
        expected = attend(q, *short.dequantized(), context=context)
        (y,) = graph.module(torch.tensor([slot]), q, *pairs, *graph.constants)
        torch.testing.assert_close(y, expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_other_calls_are_left_to_attend():
    q, pairs = call(9, 2, 3)
    context = contexts(9)["plain"]
    several = Context(2, 9, causal=True)
    assert attend_to_integers(q.expand(-1, -1, 2, -1), pairs, None, several, None) is None
    with torch.enable_grad():
        assert attend_to_integers(q, pairs, None, context, None) is None
    pairs.value_scale[1, 0, 0] = torch.nan
    assert attend_to_integers(q, pairs, None, context, None) is None
