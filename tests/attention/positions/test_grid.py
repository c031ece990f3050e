"""Rows and columns of an image as positions."""

import pytest
import torch

from polyformer import InputError
from polyformer.attention.positions import GridConfig, Shape
from polyformer.core.sequence.context import Image


def test_a_place_gets_its_row_its_column_and_its_colour():
    grid = GridConfig(shape=(2, 3, 2)).build(Shape(hidden_size=4))
    rows, columns, colours = (table.weight for table in grid.tables)
    assert [len(table) for table in (rows, columns, colours)] == [3, 3, 2]
    embedded = grid.embed(torch.zeros(1, 13, 4), torch.arange(13), 0)[0]
    place = 0
    for row in range(2):
        for column in range(3):
            for colour in range(2):
                torch.testing.assert_close(embedded[place], rows[row] + columns[column] + colours[colour])
                place += 1
    torch.testing.assert_close(embedded[12], rows[2] + columns[0] + colours[0])


def test_only_the_first_layer_gets_it():
    grid, x = GridConfig(shape=(2, 3)).build(Shape(hidden_size=4)), torch.randn(1, 6, 4)
    assert grid.embed(x, torch.arange(6), 1) is x


def test_more_tokens_than_places_and_bad_shapes_are_refused():
    grid = GridConfig(shape=(2, 3)).build(Shape(hidden_size=4))
    grid.embed(torch.zeros(1, 7, 4), torch.arange(7), 0)
    with pytest.raises(InputError, match="input of 8 tokens: a grid of 2x3 has 6 places and one for a start"):
        grid.embed(torch.zeros(1, 8, 4), torch.arange(8), 0)
    with pytest.raises(InputError, match=r"grid: shape: expected 2 or 3 numbers, got \[2\]"):
        GridConfig(shape=(2,))


def test_tokens_before_the_patches_have_no_place():
    torch.manual_seed(0)
    grid = GridConfig(shape=(2, 3)).build(Shape(hidden_size=4, image=Image(2, 2, 3)))
    x = torch.randn(1, 8, 4)
    embedded = grid.embed(x, torch.arange(8), 0)
    rows, columns = (table.weight for table in grid.tables)
    assert torch.equal(embedded[:, :2], x[:, :2])
    for place in range(6):
        expected = x[0, 2 + place] + rows[place // 3] + columns[place % 3]
        torch.testing.assert_close(embedded[0, 2 + place], expected)
    with pytest.raises(
        InputError, match=r"position.shape: expected \[2, 3\], the rows and columns of patches"
    ):
        GridConfig(shape=(3, 2)).build(Shape(hidden_size=4, image=Image(2, 2, 3)))
