"""Learned positions: one table at the input, or one a layer; nothing beyond the table."""

import pytest
import torch

from polyformer.attention.positions import LearnedConfig, LearnedPerLayerConfig, NoPositionConfig, Shape
from polyformer.core.errors import InputError

SHAPE = Shape(hidden_size=4, num_layers=3, max_positions=10)


def test_one_table_at_the_input():
    position = LearnedConfig().build(SHAPE)
    x, pos = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [7, 8, 9]])
    assert [tuple(parameter.shape) for parameter in position.parameters()] == [(10, 4)]
    assert torch.equal(position.embed(x, pos, 0), x + next(position.parameters())[pos])
    assert position.embed(x, pos, 1) is x


def test_a_table_for_every_layer():
    position = LearnedPerLayerConfig().build(SHAPE)
    x, pos = torch.randn(2, 3, 4), torch.arange(3)
    tables = list(position.parameters())
    assert [tuple(table.shape) for table in tables] == [(10, 4)] * 3
    for layer in range(3):
        assert torch.equal(position.embed(x, pos, layer), x + tables[layer][pos])


@pytest.mark.parametrize("config", [LearnedConfig(), LearnedPerLayerConfig()])
def test_beyond_the_table_is_an_error(config: LearnedConfig):
    position = config.build(SHAPE)
    with pytest.raises(InputError) as caught:
        position.embed(torch.randn(1, 11, 4), torch.arange(11), 0)
    assert str(caught.value) == (
        "input of 11 tokens: longer than the 10 learned positions (max_position_embeddings); "
        "shorten the text or choose another position scheme"
    )
    assert position.embed(torch.randn(1, 10, 4), torch.arange(10), 0).shape == (1, 10, 4)
    assert position.embed(torch.randn(1, 0, 4), torch.arange(0), 0).shape == (1, 0, 4)


def test_a_table_of_nothing_is_refused():
    with pytest.raises(InputError, match="max_position_embeddings: learned positions need 1 or more, got 0"):
        LearnedConfig().build(Shape(hidden_size=4, max_positions=0))


def test_no_positions():
    position = NoPositionConfig().build(SHAPE)
    x = torch.randn(1, 3, 4)
    assert position.embed(x, torch.arange(3), 0) is x
    assert list(position.parameters()) == []
