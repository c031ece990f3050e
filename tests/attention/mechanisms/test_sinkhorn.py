"""Sinkhorn attention: its soft permutation, special cases worked out by hand, and its state."""

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.mechanisms import SinkhornConfig, SortCutConfig
from polyformer.attention.mechanisms.sinkhorn.blocks import sort_blocks
from polyformer.attention.mechanisms.sinkhorn.definition import sinkhorn_balance
from polyformer.attention.mechanisms.sinkhorn.sinkhorn import Sinkhorn, SinkhornState
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context


def built(heads: int = 2, width: int = 4, cut: int | None = None, **options: Any) -> Sinkhorn:
    torch.manual_seed(0)
    options = {"block_size": 3, "max_length": 60, **options}
    config = SinkhornConfig(**options) if cut is None else SortCutConfig(cut=cut, **options)
    return config.build(heads, width).double().eval()


def tensors(length: int, rows: int = 2) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, 2, length, 4, dtype=torch.float64) for _ in range(3)]


def permuting(module: Sinkhorn, order: list[int]) -> Sinkhorn:
    """Block order[i] stands in the place of block i, whatever the keys."""
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.zero_()
        # A representation whose i-th number alone is great is that of block i.
        module.net.hidden.copy_(torch.eye(module.net.hidden.shape[1]).expand_as(module.net.hidden))
        for i, j in enumerate(order):
            module.net.scores[:, i, j] = 100.0
    return module


def by_block(length: int, size: int) -> list[Tensor]:
    """Inputs whose keys tell their block."""
    q, k, v = tensors(length)
    return [q, k * 0.1 + 10 * F.one_hot(torch.arange(length) // size, 4), v]


def everything(count: int) -> Tensor:
    return torch.ones(1, 1, count, count, dtype=torch.bool)


def test_two_blocks_by_hand():
    """Rows of [[a, b], [c, d]] are divided by a + b and c + d, then columns, then rows."""
    scores = torch.tensor([[3.0, 1.0], [2.0, 2.0]], dtype=torch.float64).log().view(1, 1, 2, 2)
    s, taken = sinkhorn_balance(scores, everything(2), 1, None, causal=False)
    # Rows: 3/4 1/4, 1/2 1/2. Columns: 3/5 1/3, 2/5 2/3. Rows: 9/14 5/14, 3/8 5/8.
    expected = torch.tensor([[9 / 14, 5 / 14], [3 / 8, 5 / 8]], dtype=torch.float64)
    torch.testing.assert_close(s[0, 0], expected)
    assert taken is None


def test_three_blocks_by_hand_causally():
    """Row 1 has block 0 alone; of the column that row 1 took, row 2 gets what it asks for beside row 1."""
    scores = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    s, taken = sinkhorn_balance(scores, everything(3).tril(-1), 1, None, causal=True)
    # Rows: 1; 1/2 1/2. Columns so far: 1; (1/2) / (3/2) and (1/2) / (1/2). Rows: 1; 1/4 3/4.
    expected = torch.tensor([[0, 0, 0], [1, 0, 0], [0.25, 0.75, 0]], dtype=torch.float64)
    torch.testing.assert_close(s[0, 0], expected)
    assert taken is not None
    torch.testing.assert_close(taken[0, 0, 0, :2].exp(), torch.tensor([1.5, 0.5], dtype=torch.float64))


def test_balancing_makes_it_doubly_stochastic():
    torch.manual_seed(2)
    scores = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    s, _ = sinkhorn_balance(scores, everything(5), 200, None, causal=False)
    for axis in (2, 3):
        torch.testing.assert_close(s.sum(axis), torch.ones(2, 3, 5, dtype=torch.float64))


def test_a_low_temperature_makes_it_a_permutation():
    """The one whose scores have the greatest sum."""
    scores = torch.tensor([[0.9, 0.8, 0.0], [0.7, 0.0, 0.1], [0.2, 0.3, 0.6]], dtype=torch.float64)
    s, _ = sinkhorn_balance(scores.view(1, 1, 3, 3) / 0.02, everything(3), 400, None, causal=False)
    best = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(s[0, 0], best, atol=2e-3, rtol=0)


def test_causal_rows_depend_on_earlier_rows_alone():
    """Whatever the iterations; columns divided by the sums of all rows would not."""
    torch.manual_seed(3)
    scores = torch.randn(1, 2, 7, 7, dtype=torch.float64, requires_grad=True)
    earlier = everything(7).tril(-1)
    s, _ = sinkhorn_balance(scores, earlier, 9, None, causal=True)
    for seen in range(1, 7):
        (slope,) = torch.autograd.grad(s[:, :, :seen].square().sum(), scores, retain_graph=True)
        assert slope[:, :, seen:].abs().max() == 0
    part, _ = sinkhorn_balance(scores[:, :, :4], earlier[:, :, :4], 9, None, causal=True)
    assert torch.equal(part, s[:, :, :4])
    whole, _ = sinkhorn_balance(scores, earlier, 9, None, causal=False)
    (slope,) = torch.autograd.grad(whole[:, :, :4].square().sum(), scores)
    assert slope[:, :, 4:].abs().max() > 0


def test_rows_come_in_runs():
    torch.manual_seed(4)
    scores, earlier = torch.randn(1, 2, 6, 6, dtype=torch.float64), everything(6).tril(-1)
    whole, end = sinkhorn_balance(scores, earlier, 4, None, causal=True)
    taken, parts = None, []
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        s, taken = sinkhorn_balance(
            scores[:, :, start:stop], earlier[:, :, start:stop], 4, taken, causal=True
        )
        parts.append(s)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(taken, end)


def test_blocks_in_their_own_places_are_attention_within_blocks():
    """The own block twice is the own block."""
    module = permuting(built(), [0, 1, 2, 3])
    q, k, v = by_block(12, 3)
    y, _ = module(q, k, v, Context(12, 12), None, None)
    block = torch.arange(12) // 3
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=block.unsqueeze(1) == block)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_sorted_blocks_stand_beside_the_own():
    order = [2, 0, 3, 1]
    module, (q, k, v) = permuting(built(), order), by_block(12, 3)
    y, _ = module(q, k, v, Context(12, 12), None, None)
    block = torch.arange(12) // 3
    other = torch.tensor(order)[block]
    seen = (block.unsqueeze(1) == block) | (other.unsqueeze(1) == block)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_a_single_block_is_dense_attention(causal: bool):
    q, k, v = tensors(9)
    y, _ = built(block_size=20)(q, k, v, Context(9, 9, causal=causal), None, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_sort_cut_attends_to_what_is_sorted_first():
    module, (q, k, v) = permuting(built(cut=2), [2, 0, 3, 1]), by_block(12, 3)
    y, _ = module(q, k, v, Context(12, 12), None, None)
    first = [6, 7, 8, 0, 1, 2]
    expected = F.scaled_dot_product_attention(q, k[:, :, first], v[:, :, first])
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_places_that_a_short_block_lacks_count_nothing():
    """The last of 11 tokens' blocks of 3 has two: sorted first, it has no third key."""
    module, (q, k, v) = permuting(built(cut=1), [3, 0, 1, 2]), by_block(11, 3)
    y, _ = module(q, k, v, Context(11, 11), None, None)
    expected = F.scaled_dot_product_attention(q, k[:, :, 9:], v[:, :, 9:])
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("cut", [None, 2])
def test_runs_of_blocks_change_nothing(cut: int | None, monkeypatch: pytest.MonkeyPatch):
    """One block at a time, outputs and gradients."""
    module, inputs = built(cut=cut), [x.requires_grad_() for x in tensors(14)]
    results = []
    for _ in range(2):
        y, _ = module(*inputs, Context(14, 14), None, None)
        results.append([y, *torch.autograd.grad(y.square().sum(), [*inputs, *module.parameters()])])
        monkeypatch.setattr("polyformer.attention.mechanisms.sinkhorn.blocks.cache_capacity", lambda x: 1)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("cut", [None, 2])
def test_recorded_weights_are_of_tokens(cut: int | None):
    """Rows sum to 1 and give the output from the values."""
    module, (q, k, v) = built(cut=cut), tensors(11)
    expected, _ = module(q, k, v, Context(11, 11), None, None)
    with recorded() as records:
        module(q, k, v, Context(11, 11), None, None)
    (weights,) = records
    torch.testing.assert_close(weights.sum(3), torch.ones(2, 2, 11, dtype=torch.float64))
    torch.testing.assert_close(weights @ v, expected)


def test_noise_is_drawn_in_training_from_the_seed():
    module, (q, k, v) = built(), tensors(12)
    context = Context(12, 12, causal=True)
    still, _ = module(q, k, v, context, None, None)
    module.train()
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(module(q, k, v, context, None, None)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], still)
    torch.testing.assert_close(outputs[0][:, :, :3], still[:, :, :3])  # the first block has nothing sorted


def test_a_state_goes_on_with_rows_that_differ():
    """Left padding moves the blocks of one row; a chunk begins several blocks, or none."""
    module, (q, k, v) = built(), tensors(20)
    valid = torch.ones(2, 20, dtype=torch.bool)
    valid[1, :4] = False
    whole, _ = module(q, k, v, Context(20, 20, causal=True, kv_valid=valid), None, None)
    state, outputs, stop = module.new_state(0), [], 0
    for size in (1, 4, 1, 1, 8, 5):
        start, stop = stop, stop + size
        part = (x[:, :, start:stop] for x in (q, k, v))
        context = Context(size, stop, causal=True, kv_valid=valid[:, :stop])
        y, state = module(*part, context, state, None)
        outputs.append(y)
    real = valid[:, None].expand(-1, 2, -1)
    torch.testing.assert_close(torch.cat(outputs, 2)[real], whole[real], rtol=1e-10, atol=1e-10)
    assert isinstance(state, SinkhornState)
    assert state.column_sums is not None
    assert state.column_sums.shape == (2, 2, 8, 7)


def test_low_temperatures_have_finite_gradients():
    module = dataclasses.replace(SinkhornConfig(block_size=3, max_length=60), temperature=1e-3).build(2, 4)
    inputs = [x.float().requires_grad_() for x in tensors(14)]
    for context in (Context(14, 14), Context(14, 14, causal=True)):
        y, _ = module.train()(*inputs, context, None, None)
        for slope in torch.autograd.grad(y.square().sum(), [*inputs, *module.parameters()]):
            assert slope.isfinite().all()


def test_a_place_of_subnormal_mass_is_empty_and_has_finite_gradients():
    s = torch.tensor([[[[1.0, 1e-40]]]], requires_grad=True)
    keys, filled = torch.ones(1, 1, 2, 2, 4), torch.tensor([1.0, 0.0, 1.0, 1.0]).view(1, 1, 2, 2, 1)
    sorted_keys, sorted_values, log_mass = sort_blocks(s, keys, keys, filled)
    assert log_mass.flatten().tolist() == [0.0, -torch.inf]
    total = (sorted_keys + sorted_values).sum() + log_mass[..., :1].sum()
    assert torch.autograd.grad(total, s)[0].isfinite().all()


def test_longer_texts_are_refused():
    module, (q, k, v) = built(max_length=9), tensors(10)
    message = "more than 9 tokens, the limit of the sorting network; shorten it, or build the mechanism"
    with pytest.raises(InputError, match=message):
        module(q, k, v, Context(10, 10), None, None)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]]).expand(2, -1)
    y, _ = module(q, k, v, Context(10, 10, q_doc=documents, kv_doc=documents), None, None)
    assert y.isfinite().all()
    valid = torch.arange(10).expand(2, -1) < 9
    module(q, k, v, Context(10, 10, kv_valid=valid), None, None)


def test_longer_documents_are_refused_in_a_graph_too():
    module, tokens = built(max_length=6), tensors(10)

    def run(ids: Tensor) -> Tensor:
        documents = ids.expand(2, -1)
        return module(*tokens, Context(10, 10, q_doc=documents, kv_doc=documents), None, None)[0]

    compiled = torch.compile(run, backend="aot_eager")
    fits, too_long = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 2]), torch.tensor([0] * 3 + [1] * 7)
    torch.testing.assert_close(compiled(fits), run(fits))
    with pytest.raises(RuntimeError, match="more than 6 tokens, the limit of the sorting network"):
        compiled(too_long)


def test_what_is_wrong_is_named():
    for name in ("block_size", "max_length", "iterations"):
        with pytest.raises(InputError, match=f"{name}: expected 1 or more, got 0"):
            SinkhornConfig(**{name: 0})
    for value in (0.0, math.inf):
        with pytest.raises(InputError, match=f"temperature: expected a number above 0, got {value}; 0.75 is"):
            SinkhornConfig(temperature=value)
    with pytest.raises(InputError, match="cut: expected 1 or more, got 0"):
        SortCutConfig(cut=0)
