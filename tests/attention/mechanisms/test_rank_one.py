"""Recurrences with free keys to read, erase and write: chunks, and the delta rule as a special case."""

import pytest
import torch
from texts_in_parts import Text, slopes_of_equal
from torch import Tensor

from polyformer.attention.mechanisms import RWKV7Config
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.mechanisms.recurrence.fused_scan import Scan
from polyformer.attention.mechanisms.recurrence.rank_one import (
    RankOneInputs,
    rank_one_recurrence,
    rank_one_scan,
)
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, recurrence

ROWS, HEADS, LENGTH, WIDTH, VALUES = 2, 2, 37, 5, 3


def leaf(*shape: int, heads: int = HEADS) -> Tensor:
    return torch.randn(ROWS, heads, *shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("groups", [HEADS, 1], ids=["", "grouped"])
def test_chunks_of_any_size_are_the_recurrence(packed: bool, groups: int):
    torch.manual_seed(0)
    q, k, reader = (leaf(LENGTH, WIDTH, heads=groups) for _ in range(3))
    v, state, decay, rate = (
        leaf(LENGTH, VALUES),
        leaf(WIDTH, VALUES),
        leaf(LENGTH, WIDTH),
        leaf(LENGTH, WIDTH),
    )
    unit = reader / reader.norm(dim=-1, keepdim=True)
    starts = torch.rand(ROWS, LENGTH) < 0.15 if packed else None
    eraser = rate.sigmoid() * unit
    tokens = RankOneInputs(q, k, v, -0.7 * decay.sigmoid(), starts=starts, reader=unit, eraser=eraser)
    leaves = [q, k, v, state, decay, rate, reader]

    def results(y: Tensor, last: Tensor) -> list[Tensor]:
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        slopes = torch.autograd.grad((y * weight).sum() + last.square().sum(), leaves, retain_graph=True)
        return [y, last, *slopes]

    expected = results(*rank_one_recurrence(tokens, state))
    for size in (1, 4, 64):
        torch.testing.assert_close(
            results(*rank_one_scan(tokens, state, size)), expected, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("form", [rank_one_recurrence, rank_one_scan])
def test_the_delta_rule_is_a_special_case(form: Scan):
    """It reads at the decayed key, and erases and writes along the key."""
    torch.manual_seed(1)
    q, k, v, state = leaf(LENGTH, WIDTH), leaf(LENGTH, WIDTH), leaf(LENGTH, VALUES), leaf(WIDTH, VALUES)
    k = k / k.norm(dim=-1, keepdim=True)
    decay, share = -leaf(LENGTH, WIDTH).sigmoid(), leaf(LENGTH, 1).sigmoid()
    tokens = RankOneInputs(q, k, share * v, decay, reader=decay.exp() * k, eraser=share * k)
    torch.testing.assert_close(form(tokens, state), recurrence(ScanInputs(q, k, v, decay, share), state))


@pytest.mark.parametrize("form", [rank_one_recurrence, rank_one_scan])
def test_a_state_without_erasure_adds(form: Scan):
    """With shares of 0 the state is the decayed sum of k v^T, whatever the key that reads."""
    torch.manual_seed(2)
    q, k, v, reader = leaf(9, WIDTH), leaf(9, WIDTH), leaf(9, VALUES), leaf(9, WIDTH)
    decay = torch.full_like(k, -0.25)
    tokens = RankOneInputs(q, k, v, decay, reader=reader, eraser=torch.zeros_like(k))
    y, _ = form(tokens, torch.zeros(ROWS, HEADS, WIDTH, VALUES, dtype=torch.float64))
    t = torch.arange(9.0, dtype=torch.float64)
    weights = torch.exp(-0.25 * (t.view(-1, 1) - t)).tril()
    torch.testing.assert_close(y, (weights * (q @ k.mT)) @ v)


GROUPS = RecurrentHeadsConfig(key_heads=1, value_heads=2, key_size=WIDTH, value_size=VALUES)


def test_decoding_in_parts_is_the_whole_text():
    """With the shift of tokens, documents and padding, for own heads: outputs and gradients."""
    torch.manual_seed(4)
    config = RWKV7Config(heads=GROUPS, decay_rank=3, rate_rank=2, output_rank=4, convolution_bias=True)
    module, plain = (form.build(7, 1).double() for form in (config, config.definition()))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    plain.load_state_dict(module.state_dict())
    q, k, v = leaf(LENGTH, WIDTH, heads=1), leaf(LENGTH, WIDTH, heads=1), leaf(LENGTH, VALUES)
    text = Text(config, (q, k, v))
    slopes = slopes_of_equal(text.read(module, *range(9, 21)), text.read(plain), module, plain, (q, k, v))
    assert all(x.abs().sum() > 0 for x in slopes)
