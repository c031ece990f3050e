"""Shaw's relative positions: which entry belongs to which distance, sizes, and the option without values."""

import pytest
import torch
from naive import SITE

from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions import Shape, ShawConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

SHAPE = Shape(hidden_size=12, num_layers=3, num_heads=4, head_size=3)


def relative(config: ShawConfig, context: Context, layer: int = 0) -> tuple[Relative, torch.nn.Module]:
    torch.manual_seed(0)
    position, q = config.build(SHAPE), torch.randn(2, 4, context.q_len, 3)
    return position.relative(q, q, context, SITE[layer]), position


def test_entries_are_clipped_differences_of_key_and_query():
    """The table runs from a key k before its query, entry 0, to one k after it, entry 2k."""
    result, position = relative(ShawConfig(clip=2), Context(4, 4), layer=1)
    assert result.first == -3
    for tables, vectors in ((position.keys, result.position_keys), (position.values, result.position_values)):
        assert vectors is not None
        expected = tables[1].weight[[4, 4, 3, 2, 1, 0, 0]]  # distances -3 .. 3, the key before is positive
        assert torch.equal(vectors, expected.unsqueeze(0))


def test_a_decoder_asks_for_the_past_alone():
    result, position = relative(ShawConfig(clip=2), Context(1, 5, causal=True))
    assert result.first == 0
    assert result.position_keys is not None
    assert torch.equal(result.position_keys[0], position.keys[0].weight[[2, 1, 0, 0, 0]])


def test_sizes():
    """Two tables [2k + 1, D] a layer, shared by its heads; without relative values one."""
    for values, count in ((True, 6), (False, 3)):
        position = ShawConfig(clip=7, values=values).build(SHAPE)
        assert [tuple(parameter.shape) for parameter in position.parameters()] == [(15, 3)] * count
    assert relative(ShawConfig(values=False), Context(3, 3))[0].position_values is None


def test_layers_share_the_tables():
    config = ShawConfig(clip=2, shared=True)
    (first, position), (last, _) = relative(config, Context(4, 4)), relative(config, Context(4, 4), layer=2)
    assert len([*position.parameters()]) == 2
    for vectors in (first, last):
        assert vectors.position_keys is not None
        assert torch.equal(vectors.position_keys[0, 0], position.keys[0].weight[4])


def test_a_clip_of_nothing_is_refused():
    with pytest.raises(InputError, match="clip: expected 1 or more, got 0"):
        ShawConfig(clip=0)
