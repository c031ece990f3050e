"""Transformer-XL's relative positions: the sinusoids it projects, its two biases, and how much it makes."""

import pytest
import torch
from naive import SITE, randomised
from torch import Tensor

from polyformer.attention.positions import Shape, TransformerXLConfig, sinusoids
from polyformer.attention.positions.transformer_xl import TransformerXL
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

SHAPE = Shape(hidden_size=10, num_layers=3, num_heads=4, head_size=3)


def test_keys_are_projected_sinusoids_of_the_distances_of_the_call():
    """One new token after six: distances 0 to 6 and no others."""
    position = randomised(TransformerXLConfig().build(SHAPE))
    q = torch.randn(2, 4, 1, 3, dtype=torch.float64)
    relative = position.relative(q, q, Context(1, 7, causal=True), SITE[2])
    assert relative.first == 0
    expected = (
        (sinusoids(torch.arange(7), 10) @ position.projections[2].weight.T).view(7, 4, 3).transpose(0, 1)
    )
    torch.testing.assert_close(relative.position_keys, expected, rtol=0, atol=1e-13)


def test_an_encoder_has_both_sides():
    position = randomised(TransformerXLConfig(clamp_distance=2).build(SHAPE))
    q = torch.randn(1, 4, 4, 3, dtype=torch.float64)
    relative = position.relative(q, q, Context(4, 4), SITE[0])
    assert relative.first == -3
    waves = sinusoids(torch.tensor([-2, -2, -1, 0, 1, 2, 2]), 10)
    expected = (waves @ position.projections[0].weight.T).view(7, 4, 3).transpose(0, 1)
    torch.testing.assert_close(relative.position_keys, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("shared", [False, True])
def test_u_meets_the_keys_and_v_the_distances(shared: bool):
    position = randomised(TransformerXLConfig(shared_biases=shared).build(SHAPE))
    q, k = torch.randn(2, 1, 4, 5, 3, dtype=torch.float64)
    context, own = Context(5, 5, causal=True), 0 if shared else 1
    shifted, same = position.rotate(q, k, context, SITE[1])
    assert same is k
    torch.testing.assert_close(shifted, q + position.u[own], rtol=0, atol=0)
    content = position.relative(shifted, k, context, SITE[1]).content
    torch.testing.assert_close(content, q + position.v[own], rtol=0, atol=1e-14)


def test_sizes():
    """W_R [H D, E] a layer; u and v [H, D] a layer, or once."""
    for shared, sets in ((False, 3), (True, 1)):
        count = sum(
            parameter.numel()
            for parameter in TransformerXLConfig(shared_biases=shared).build(SHAPE).parameters()
        )
        assert count == 3 * 12 * 10 + sets * 2 * 12


def test_a_clamp_of_nothing_is_refused():
    with pytest.raises(InputError, match="clamp_distance: expected 1 or more, got 0"):
        TransformerXLConfig(clamp_distance=0)


def fresh(position: TransformerXL, q: Tensor, first: int, count: int, layer: int = 1) -> Tensor:
    """W_R R [H, count, D] as the equation says."""
    waves = sinusoids(torch.arange(first, first + count), 10).to(q.dtype)
    return (waves @ position.projections[layer].weight.T).view(count, 4, 3).transpose(0, 1)


def keys_of(position: TransformerXL, q: Tensor, context: Context, layer: int = 1) -> Tensor:
    keys = position.relative(q, q, context, SITE[layer]).position_keys
    assert keys is not None
    return keys


@torch.no_grad()
def test_steps_after_many_tokens_keep_what_they_project(monkeypatch: pytest.MonkeyPatch):
    """Whatever was asked before, the bits are the same; and only what is new is projected."""
    position = randomised(TransformerXLConfig().build(SHAPE)).eval()
    q, ends_asked = torch.randn(2, 4, 1, 3, dtype=torch.float64), []
    waves = TransformerXL._waves
    monkeypatch.setattr(
        TransformerXL, "_waves", lambda self, q, *ends: ends_asked.append(ends) or waves(self, q, *ends)
    )
    for length in (3, 70, 71, 300, 5):
        keys = keys_of(position, q, Context(1, length, causal=True))
        torch.testing.assert_close(keys, fresh(position, q, 0, length), rtol=0, atol=1e-12)
    assert ends_asked == [(0, 63), (64, 127), (128, 255), (256, 511)]
    other = TransformerXLConfig().build(SHAPE).double().eval()
    other.load_state_dict(position.state_dict())
    context = Context(1, 71, causal=True)
    assert torch.equal(keys_of(other, q, context), keys_of(position, q, context))
    limited = Context(1, 300, causal=True, distance_range=(10, 40))
    torch.testing.assert_close(keys_of(position, q, limited), fresh(position, q, 10, 31), rtol=0, atol=1e-12)


@torch.no_grad()
def test_what_is_kept_is_never_stale():
    position = randomised(TransformerXLConfig().build(SHAPE)).eval()
    q, context = torch.randn(2, 4, 1, 3, dtype=torch.float64), Context(1, 40, causal=True)

    def check() -> None:
        expected = fresh(position, q, 0, 40)
        torch.testing.assert_close(keys_of(position, q, context), expected, rtol=0, atol=1e-5)

    check()
    position.projections[1].weight.mul_(2)
    check()
    position.projections[1].weight.numpy()[3, 4] = 9.0  # which leaves no trace
    check()
    position.projections[1].weight.data.copy_(torch.randn(12, 10))
    check()
    position.load_state_dict({name: -x for name, x in position.state_dict().items()})
    check()
    position.projections[1] = type(position.projections[1])(10, 12, bias=False).double()
    check()
    position, q = position.float(), q.float()
    check()


def test_with_gradients_and_in_training_nothing_is_kept():
    position = randomised(TransformerXLConfig().build(SHAPE)).eval()
    q, context = torch.randn(2, 4, 1, 3, dtype=torch.float64), Context(1, 40, causal=True)
    with torch.no_grad():
        keys_of(position, q, context)
    assert position._cache
    keys = keys_of(position, q, context)
    assert not position._cache
    keys.sum().backward()
    weight = position.projections[1].weight
    expected = sinusoids(torch.arange(40), 10).sum(0).expand(12, 10)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        keys_of(position.train(), q, context)
        keys_of(position.eval(), q, Context(30, 40, causal=True))  # most distances are of its own tokens
        position.projections[1].register_forward_hook(lambda *call: None)
        keys_of(position, q, context)
    assert not position._cache
