"""Statements of the five lecture texts (docs/seeds.md) about positions."""

import pytest
import torch

from polyformer.attention.positions.base import sinusoids
from polyformer.models.presets import create_model


def test_sinusoids_are_distinct_bounded_and_consistent():
    """The three criteria; the distance of two vectors depends on that of their positions, not on the text."""
    table = sinusoids(torch.arange(2000), 128)
    assert table.abs().max() <= 1
    distances = torch.cdist(table, table)
    assert (distances + 10 * torch.eye(2000)).min() > 0.1
    for apart in (1, 7, 400):
        along = distances.diagonal(apart)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-6, atol=1e-6)


def test_positions_divided_by_the_length_mean_other_distances():
    """pos / (T - 1): a difference of 1/29 is one token of 30, and three of 90."""
    steps = {length: 1 / (length - 1) for length in (30, 90)}
    assert steps[30] == pytest.approx(0.0345, abs=1e-4)  # the text: 0.0333
    assert steps[30] / steps[90] == pytest.approx(3.07, abs=0.01)
    short, long = (torch.arange(length) / (length - 1) for length in (30, 90))
    assert (short[-1], long[-1]) == (1, 1), "the last token of every text has the same position"


def test_integer_positions_exceed_token_vectors():
    torch.manual_seed(0)
    largest = create_model("encoder-tiny").get_parameter("tokens.weight").abs().max()
    positions = torch.arange(1.0, 513)
    assert positions[0] > largest
    assert positions[-1] > 1000 * largest
    assert positions[-1] / positions[0] == 512
    assert sinusoids(torch.arange(512), 16).abs().max() <= 1


def test_absolute_positions_repeat_in_every_segment():
    """A memory whose segments each count from 0 gives two tokens one position; distances tell them apart."""
    length, positions = 4, torch.arange(4).repeat(2)
    table = sinusoids(positions, 8)
    assert torch.equal(table[:length], table[length:])
    query, keys = 2 * length - 1, torch.arange(2 * length)
    assert len(set((query - keys).tolist())) == 2 * length


def test_positions_added_to_inputs_reach_queries_keys_and_values():
    """(x + p) W = x W + p W, for each of the three matrices."""
    torch.manual_seed(0)
    x, p, *matrices = torch.randn(5, 6, 6, dtype=torch.float64)
    for matrix in matrices:
        torch.testing.assert_close((x + p) @ matrix, x @ matrix + p @ matrix, rtol=1e-12, atol=1e-12)
