"""The scan in chunks against its recurrence: outputs, states and gradients, for every kind of gate."""

import itertools

import pytest
import torch
from texts_in_parts import Text, slopes_of_equal
from torch import Tensor

from polyformer.attention.mechanisms import GatedDeltaConfig, GLAConfig, LinearAttentionConfig, SSDConfig
from polyformer.attention.mechanisms.recurrence import base
from polyformer.attention.mechanisms.recurrence.base import RecurrenceConfig, RecurrentHeadsConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, chunked_scan, recurrence
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context

ROWS, HEADS, LENGTH, WIDTH, VALUES = 2, 2, 37, 5, 3


def leaf(*shape: int, heads: int = HEADS) -> Tensor:
    return torch.randn(ROWS, heads, *shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("channels", [0, 1, WIDTH])
@pytest.mark.parametrize("erases", [False, True], ids=["", "erase"])
@pytest.mark.parametrize("groups", [HEADS, HEADS // 2], ids=["", "grouped"])
def test_chunks_of_any_size_are_the_recurrence(packed: bool, channels: int, erases: bool, groups: int):
    """A decay per head, per channel or none, and the delta rule, with documents, after a state."""
    torch.manual_seed(0)
    q, k = leaf(LENGTH, WIDTH, heads=groups), leaf(LENGTH, WIDTH, heads=groups)
    v, state = leaf(LENGTH, VALUES), leaf(WIDTH, VALUES)
    decay, erase = (leaf(LENGTH, channels) if channels else None), (leaf(LENGTH, 1) if erases else None)
    unit = k / k.norm(dim=-1, keepdim=True)
    rates = None if decay is None else -decay.exp(), None if erase is None else 2 * erase.sigmoid()
    starts = torch.rand(ROWS, LENGTH) < 0.15 if packed else None
    tokens = ScanInputs(q, unit, v, *rates, starts)
    leaves = [x for x in (q, k, v, state, decay, erase) if x is not None]

    def results(y: Tensor, last: Tensor) -> list[Tensor]:
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        slopes = torch.autograd.grad((y * weight).sum() + last.square().sum(), leaves, retain_graph=True)
        return [y, last, *slopes]

    expected = results(*recurrence(tokens, state))
    for size in (1, 4, 64):  # 64: a single chunk, the parallel form
        torch.testing.assert_close(
            results(*chunked_scan(tokens, state, size)), expected, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("channels", [1, WIDTH])
def test_strong_decays_neither_overflow_nor_lose_gradients(channels: int):
    """A token that clears the state: exp(F_i - F_j) of a later key would be infinite."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 1, 40, WIDTH, requires_grad=True) for _ in range(3))
    decay = torch.full((1, 1, 40, channels), -0.01).index_fill(2, torch.tensor([11, 12, 29]), -1e4)
    y, state = chunked_scan(ScanInputs(q, k, v, decay.requires_grad_()), torch.ones(1, 1, WIDTH, WIDTH))
    (y.sum() + state.sum()).backward()
    # Cleared twice in a row, token 12 sees only itself.
    expected = (q * k).sum(-1, keepdim=True) * v
    torch.testing.assert_close(y[:, :, 12], expected[:, :, 12])
    for x, name in itertools.zip_longest((q, k, v, decay), ("q", "k", "v", "decay")):
        assert x.grad is not None, name
        assert x.grad.isfinite().all(), name


def test_a_segment_is_longer_than_the_cache_of_a_chunk():
    """Several segments, the last of them short, in float32."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, 1100, 8) for _ in range(3))
    tokens = ScanInputs(q, k / k.norm(dim=-1, keepdim=True), v, erase=torch.rand(1, 2, 1100, 1))
    actual, expected = (run(tokens, torch.zeros(1, 2, 8, 8)) for run in (chunked_scan, recurrence))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_recorded_weights_are_those_of_the_values(causal: bool):
    """Linear attention without a state; a state has no weights of single tokens."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 2, 9, WIDTH, dtype=torch.float64) for _ in range(3))
    module, context = LinearAttentionConfig().build(2, WIDTH), Context(9, 9, causal=causal)
    with recorded() as records:
        y, state = module(q, k, v, context, module.new_state(0), None)
    torch.testing.assert_close(records[0] @ v, y)
    if causal:
        torch.testing.assert_close(records[0], records[0].tril())
        with (
            recorded(),
            pytest.raises(InputError, match="output_attentions: the state of a recurrence has no"),
        ):
            module(q, k, v, Context(9, 18, causal=True), state, None)


GROUPS = RecurrentHeadsConfig(key_heads=2, value_heads=4, key_size=WIDTH, value_size=VALUES)


@pytest.mark.parametrize("kind", [GatedDeltaConfig, GLAConfig, SSDConfig], ids=lambda kind: kind.kind)
def test_heads_of_a_group_share_queries_and_keys(
    kind: type[RecurrenceConfig], monkeypatch: pytest.MonkeyPatch
):
    """Both forms with biased convolutions, documents and padding on the left: outputs and gradients.

    The chunks read the text in two calls, and in segments of 8 tokens.
    """
    torch.manual_seed(4)
    config = kind(heads=GROUPS, short_convolution=3, convolution_bias=True)
    module = config.build(7, 1).double()
    plain = config.definition().build(7, 1).double()
    plain.load_state_dict(module.state_dict())
    q, k, v = (leaf(LENGTH, width) for width in (WIDTH, WIDTH, VALUES))
    v = torch.cat([v, v.flip(2)], 1)
    text = Text(config, (q, k, v))
    expected = text.read(plain)
    monkeypatch.setattr(base, "SEGMENT", 8)
    slopes_of_equal(text.read(module, 9), expected, module, plain, (q, k))


def test_value_heads_are_whole_groups():
    with pytest.raises(InputError, match="key_heads: expected a divisor of the 4 value_heads, got 3"):
        RecurrentHeadsConfig(key_heads=3, value_heads=4, key_size=2, value_size=2)
    with pytest.raises(InputError, match=r"max_step: expected at least min_step 1.0, got 0.5"):
        SSDConfig(min_step=1.0, max_step=0.5)
