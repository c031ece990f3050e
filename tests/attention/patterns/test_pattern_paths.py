"""Paths through layers: the arguments of the Sparse Transformer and of BigBird for their patterns."""

import pytest
import torch

from polyformer.attention.patterns import (
    Causal,
    Fixed,
    Full,
    Global,
    PerHead,
    PerLayer,
    Random,
    Strided,
    Window,
)
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.paths import path_lengths
from polyformer.core.sequence.context import Context


def causal(pattern: Pattern, length: int = 64, heads: int = 1, layers: int = 64) -> torch.Tensor:
    """Return the path lengths of all causal pairs."""
    lengths = path_lengths(pattern, Context(length, length, causal=True), heads, layers)
    assert (lengths.triu(1) <= 0).all(), "the future reached the past"
    return lengths[torch.ones(length, length).tril(-1).bool()]


@pytest.mark.parametrize("integration", ["heads", "layers", "merged"])
def test_two_factors_of_a_sparse_transformer_connect_every_pair_within_three_steps(integration: str) -> None:
    # Section 4.2: with p factors every pair is connected within p + 1 steps; here p = 2, stride = sqrt(64).
    window, strided = Window(8), Strided(8)
    pattern: Pattern = {
        "heads": PerHead((window, strided)),
        "layers": PerLayer((window, strided)),
        "merged": window | strided,
    }[integration]
    lengths = causal(pattern, heads=2)
    assert lengths.min() > 0
    assert lengths.max() <= 3


def test_one_factor_leaves_pairs_unconnected() -> None:
    assert (causal(Strided(8)) == -1).sum() > 0.8 * 64 * 63 / 2


def test_the_summary_columns_of_a_fixed_pattern_connect_every_pair_within_two_steps() -> None:
    assert causal(Fixed(8, 1)).max() == 2


def test_a_window_needs_as_many_layers_as_windows_lie_between() -> None:
    lengths = path_lengths(Window(4), Context(40, 40, causal=True))
    queries, keys = torch.arange(40).view(-1, 1), torch.arange(40)
    expected = -((keys - queries) // 4)  # ceil(distance / 4): each layer reads 4 earlier tokens
    assert torch.equal(lengths.tril(), expected.clamp(min=0).tril())


def test_global_and_random_keys_make_the_paths_of_bigbird_short() -> None:
    plain = Context(128, 128)
    window = path_lengths(Window(3), plain)
    assert window.max() == 43  # ceil(127 / 3)
    assert path_lengths(Window(3) | Global(1), plain).max() == 2
    assert path_lengths(Window(3) | Random(2, size=1), plain).max() <= 6


def test_layers_that_differ_are_followed_in_their_order() -> None:
    first = causal(PerLayer((Causal(), Strided(64))), layers=1)
    assert (first == 1).all()
    only_itself = Strided(64)
    assert (causal(PerLayer((only_itself, Causal())), layers=1) == -1).all()
    assert (causal(PerLayer((only_itself, Causal()))) == 2).all()
    assert (path_lengths(Full(), Context(5, 5)) == 1 - torch.eye(5)).all()
