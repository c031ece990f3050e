"""Terms of the scores that depend on the distance: Shaw's vectors and DA-Transformer's rescaling."""

import math

import pytest
import torch
from naive import SITE, randomised

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions import DistanceAwareConfig, Shape, ShawConfig
from polyformer.attention.positions.by_distance import rescaling
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

SHAPE = Shape(hidden_size=12, num_layers=3, num_heads=4, head_size=3)


def relative(config: ShawConfig, context: Context, layer: int = 0) -> tuple[Relative, torch.nn.Module]:
    torch.manual_seed(0)
    position, q = config.build(SHAPE), torch.randn(2, 4, context.q_len, 3)
    return position.relative(q, q, context, SITE[layer]), position


def test_shaws_entries_are_clipped_differences_of_key_and_query():
    """The table runs from a key k before its query, entry 0, to one k after it, entry 2k."""
    result, position = relative(ShawConfig(clip=2), Context(4, 4), layer=1)
    assert result.first == -3
    for tables, vectors in ((position.keys, result.position_keys), (position.values, result.position_values)):
        assert vectors is not None
        expected = tables[1].weight[[4, 4, 3, 2, 1, 0, 0]]  # distances -3 .. 3, the key before is positive
        assert torch.equal(vectors, expected.unsqueeze(0))


def test_a_decoder_asks_shaws_tables_for_the_past_alone():
    result, position = relative(ShawConfig(clip=2), Context(1, 5, causal=True))
    assert result.first == 0
    assert result.position_keys is not None
    assert torch.equal(result.position_keys[0], position.keys[0].weight[[2, 1, 0, 0, 0]])


def test_shaws_tables_have_their_sizes():
    """Two tables [2k + 1, D] a layer, shared by its heads; without relative values one."""
    for values, count in ((True, 6), (False, 3)):
        position = ShawConfig(clip=7, values=values).build(SHAPE)
        assert [tuple(parameter.shape) for parameter in position.parameters()] == [(15, 3)] * count
    assert relative(ShawConfig(values=False), Context(3, 3))[0].position_values is None


def test_layers_share_shaws_tables():
    config = ShawConfig(clip=2, shared=True)
    (first, position), (last, _) = relative(config, Context(4, 4)), relative(config, Context(4, 4), layer=2)
    assert len([*position.parameters()]) == 2
    for vectors in (first, last):
        assert vectors.position_keys is not None
        assert torch.equal(vectors.position_keys[0, 0], position.keys[0].weight[4])


def test_a_clip_of_nothing_is_refused():
    with pytest.raises(InputError, match="clip: expected 1 or more, got 0"):
        ShawConfig(clip=0)


BOUNDS = torch.tensor([-3.0, 0.0, 0.7, 5.0], dtype=torch.float64)


@pytest.mark.parametrize("b", BOUNDS.tolist())
def test_the_rescaling_function_is_the_papers(b: float):
    """f(0) = 1; to 0 at minus infinity; to 1 + e^b at infinity; rising all the way between."""
    distance = torch.linspace(-60, 60, 241, dtype=torch.float64)
    f = rescaling(distance, torch.tensor(b, dtype=torch.float64))
    expected = torch.tensor([(1 + math.exp(b)) / (1 + math.exp(b - r)) for r in distance.tolist()])
    torch.testing.assert_close(f, expected.double(), rtol=1e-6, atol=0)
    assert abs(f[120] - 1) < 1e-14
    assert f[0] < 1e-20
    assert math.isclose(f[-1], 1 + math.exp(b), rel_tol=1e-12)
    assert (f.diff()[:180] > 0).all()
    assert (f.diff() >= 0).all()


def test_no_rescaling_overflows():
    """Where e^b or e^(b - R) is beyond float32; the gradients too."""
    distance = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], requires_grad=True)
    b = torch.tensor([-300.0, 0.0, 60.0, 300.0]).unsqueeze(1).requires_grad_()
    f = rescaling(distance, b)
    assert f.isfinite().all()
    torch.testing.assert_close(f[:, 2], torch.ones(4))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(f.sum(), (distance, b)))


def test_each_head_and_layer_has_its_own_rescaling():
    position = randomised(DistanceAwareConfig().build(Shape(hidden_size=8, num_layers=3, num_heads=2)))
    assert [tuple(parameter.shape) for parameter in position.parameters()] == [(3, 2), (3, 2)]
    q = torch.zeros(1, 2, 6, 4, dtype=torch.float64)
    h, i, j = torch.arange(2).view(2, 1, 1), torch.arange(6).view(6, 1), torch.arange(6)
    for layer in range(3):
        mod = position.score_mod(q, q, Context(6, 6), SITE[layer])
        modified = mod(torch.ones(2, 6, 6, dtype=torch.float64), torch.tensor(0), h, i, j)
        w, b = position.w[layer].view(2, 1, 1), position.b[layer].view(2, 1, 1)
        expected = (1 + b.exp()) / (1 + (b - w * (i - j).abs()).exp())
        torch.testing.assert_close(modified, expected, rtol=1e-12, atol=0)


def test_rescaling_starts_without_distances():
    """w = b = 0: f is 1 everywhere, what is left is the clipping."""
    position = DistanceAwareConfig().build(Shape(hidden_size=8, num_heads=2)).double()
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    context = Context(5, 5, causal=True)
    output = attend(q, k, v, context=context, score_mod=position.score_mod(q, k, context, SITE[0]))
    scores = (q @ k.mT / 2).relu().masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(output, scores.softmax(-1) @ v, rtol=1e-12, atol=1e-12)


def test_rescaled_negative_scores_count_as_zero():
    """A key against the query gets what an indifferent one gets, however far."""
    position = randomised(DistanceAwareConfig().build(Shape(hidden_size=4, num_heads=1)))
    q, k = torch.ones(1, 1, 1, 4, dtype=torch.float64), torch.randn(1, 1, 1, 4).abs().double()
    k = torch.cat([-k, torch.zeros_like(k), -5 * k], 2)
    context = Context(1, 3)
    v = torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    output = attend(q, k, v, context=context, score_mod=position.score_mod(q, k, context, SITE[0]))
    torch.testing.assert_close(output.flatten(), torch.full((3,), 1 / 3, dtype=torch.float64))
