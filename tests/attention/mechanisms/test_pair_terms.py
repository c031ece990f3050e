"""Tiles with a scheme's terms: what a recomputation needs of the forward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyformer.attention.mechanisms import pair_terms
from polyformer.attention.mechanisms.pair_terms import Pairs, PairTerms, PairTiles, TokenRows, tile_attention
from polyformer.core.sequence.context import Context

LENGTH, WIDTH = 8, 4


def tile() -> PairTiles:
    """All queries and all keys of a single head."""
    places, zero = torch.arange(LENGTH), torch.zeros(1, 1, 1, dtype=torch.long)
    pairs = Pairs(zero, zero, places.view(1, -1, 1), places.view(1, 1, -1))
    return PairTiles(places[None], places[None], pairs, lambda: torch.ones(1, LENGTH, LENGTH).bool())


def attention(rows: TokenRows, dropped: float) -> Tensor:
    terms = PairTerms(Context(LENGTH, LENGTH), WIDTH**-0.5, None, None)
    return tile_attention(rows, tile(), terms, dropped)[0]


def test_a_recomputed_tile_drops_the_same_weights():
    torch.manual_seed(0)
    q, k, v = (torch.randn(LENGTH, WIDTH, dtype=torch.float64) for _ in range(3))
    v.requires_grad_()
    y = attention(TokenRows(q, q, k, v), dropped=0.5)
    # y is linear in v: y = P v, and so sum(y * g) = sum(v * (P^T g)) only with the same P in both passes.
    g = torch.randn_like(y)
    torch.randn(3)  # another state of the random generator
    (grad,) = torch.autograd.grad(y, v, g)
    torch.testing.assert_close((y * g).sum(), (v * grad).sum())


def test_the_recomputation_has_the_tensors_as_arguments(monkeypatch: pytest.MonkeyPatch):
    # `checkpoint` saves the random states of the devices of its arguments: without them, a tile on a GPU
    # would drop other weights in the backward pass than in the forward pass.
    arguments: list[Any] = []

    def recorded(run: Any, *tensors: Any, **options: Any) -> Any:
        arguments.extend(tensors)
        return checkpoint(run, *tensors, **options)

    monkeypatch.setattr(pair_terms, "checkpoint", recorded)
    q, content, k, v = (torch.randn(LENGTH, WIDTH) for _ in range(4))
    attention(TokenRows(q, content, k, v), dropped=0.5)
    assert [id(x) for x in arguments] == [id(x) for x in (q, content, k, v)]
