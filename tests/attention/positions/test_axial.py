"""Positions on a grid: each vector by the equation, and what is refused."""

import pytest
import torch

from polyformer.attention.positions import AxialConfig, Shape
from polyformer.core.errors import InputError


@pytest.mark.parametrize(("grid", "widths"), [((3, 4), (2, 6)), ((2, 3, 2), (1, 3, 4)), ((5, 2), None)])
def test_each_vector_is_made_of_its_axes(grid: tuple[int, ...], widths: tuple[int, ...] | None):
    position = AxialConfig(grid=grid, widths=widths).build(Shape(hidden_size=8)).double()
    tables = list(position.parameters())
    assert [table.shape[1] for table in tables] == list(widths or (2, 6))
    places = torch.cartesian_prod(*map(torch.arange, grid))  # the last axis runs fastest
    x = torch.randn(len(places), 8).double()
    embedded = position.embed(x[None], torch.arange(len(places)), 0)[0]
    for place, row, actual in zip(places.tolist(), x, embedded, strict=True):
        vector = torch.cat([table[i] for table, i in zip(tables, place, strict=True)])
        torch.testing.assert_close(actual, row + vector, rtol=1e-12, atol=1e-12)
    assert position.embed(x, torch.arange(3), 1) is x


def test_what_is_no_grid_is_refused():
    with pytest.raises(InputError, match="grid"):
        AxialConfig(grid=(64,))
    with pytest.raises(InputError, match="widths"):
        AxialConfig(grid=(4, 4), widths=(1, 2, 3))
    with pytest.raises(InputError, match="widths: expected numbers that add up to hidden_size 8"):
        AxialConfig(grid=(4, 4), widths=(1, 2)).build(Shape(hidden_size=8))
    with pytest.raises(InputError, match="max_position_embeddings"):
        AxialConfig(grid=(2, 3)).build(Shape(hidden_size=8)).embed(torch.zeros(1, 1, 8), torch.tensor([6]), 0)
