"""Several steps of the delta rule for each token: the fast form, rotations, and fla's own form."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from texts_in_parts import Text, slopes_of_equal
from torch import Tensor

from polyformer.attention.mechanisms import DeltaConfig, GatedDeltaConfig
from polyformer.attention.mechanisms.recurrence.base import RecurrentHeadsConfig
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs, chunked_scan, recurrence
from polyformer.attention.mechanisms.recurrence.steps import StepInputs, step_recurrence, step_scan
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context

ROWS, HEADS, LENGTH, WIDTH, VALUES = 2, 2, 23, 5, 3


def foreign(name: str) -> ModuleType:
    """A module of flash-linear-attention by its file: its packages import Triton."""
    file = Path(sys.prefix, "share", "interpreter", *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaf(*shape: int, heads: int = HEADS) -> Tensor:
    return torch.randn(ROWS, heads, *shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("channels", [0, 1, WIDTH])
@pytest.mark.parametrize(("steps", "groups"), [(1, HEADS), (2, 1), (3, HEADS)])
def test_one_scan_of_all_steps_is_the_recurrence(packed: bool, channels: int, steps: int, groups: int):
    torch.manual_seed(0)
    q, k = leaf(LENGTH, WIDTH, heads=groups), leaf(LENGTH, steps, WIDTH, heads=groups)
    v, state = leaf(LENGTH, steps, VALUES), leaf(WIDTH, VALUES)
    decay, erase = (leaf(LENGTH, channels) if channels else None), leaf(LENGTH, steps, 1)
    starts = torch.rand(ROWS, LENGTH) < 0.15 if packed else None
    rates = None if decay is None else -decay.exp()
    tokens = StepInputs(q, k / k.norm(dim=-1, keepdim=True), v, rates, 2 * erase.sigmoid(), starts)
    leaves = [x for x in (q, k, v, state, decay, erase) if x is not None]

    def results(y: Tensor, last: Tensor) -> list[Tensor]:
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        slopes = torch.autograd.grad((y * weight).sum() + last.square().sum(), leaves, retain_graph=True)
        return [y, last, *slopes]

    expected = results(*step_recurrence(tokens, state))
    for scan in (recurrence, chunked_scan):
        torch.testing.assert_close(results(*step_scan(scan)(tokens, state)), expected, rtol=1e-10, atol=1e-10)


def test_one_step_is_the_delta_rule():
    torch.manual_seed(1)
    q, k, v = leaf(LENGTH, WIDTH), leaf(LENGTH, WIDTH), leaf(LENGTH, VALUES)
    decay, erase, state = -leaf(LENGTH, 1).exp(), leaf(LENGTH, 1).sigmoid(), leaf(WIDTH, VALUES)
    steps = StepInputs(q, k.unsqueeze(3), v.unsqueeze(3), decay, erase.unsqueeze(3))
    expected = recurrence(ScanInputs(q, k, v, decay, erase), state)
    torch.testing.assert_close(step_recurrence(steps, state), expected)


def test_two_steps_track_the_permutations_of_three_elements():
    """Two exchanges of two elements are any rotation of three, which one step is not."""
    units = torch.eye(3, dtype=torch.float64)
    orders = list(itertools.permutations(range(3)))
    torch.manual_seed(2)
    chosen = torch.randint(len(orders), (29,)).tolist()
    keys = torch.zeros(1, 1, len(chosen), 2, 3, dtype=torch.float64)
    place = units
    for t, number in enumerate(chosen):
        order = list(orders[number])
        place = place[order]
        left, step = list(range(3)), 0
        for i in range(3):  # exchanges that sort the rows of the state into this order
            j = left.index(order[i])
            if i != j:
                left[i], left[j] = left[j], left[i]
                keys[0, 0, t, step] = (units[i] - units[j]) * 0.5**0.5
                step += 1
    values, twice = torch.zeros_like(keys), torch.full_like(keys[..., :1], 2.0)
    queries = torch.zeros(1, 1, len(chosen), 3, dtype=torch.float64)
    _, state = step_scan(chunked_scan)(StepInputs(queries, keys, values, None, twice), units.view(1, 1, 3, 3))
    torch.testing.assert_close(state[0, 0], place)


@pytest.mark.parametrize("gated", [False, True])
def test_the_recurrence_is_that_of_flash_linear_attention(gated: bool):
    """Its naive form is in float32, with tokens before heads and the steps of a token in turn."""
    naive = foreign("fla.ops.gated_delta_product.naive").naive_recurrent_gated_delta_product
    torch.manual_seed(3)
    steps = 3
    q, k, v = (
        torch.randn(ROWS, HEADS, LENGTH, *more) for more in ((WIDTH,), (steps, WIDTH), (steps, VALUES))
    )
    k, erase = k / k.norm(dim=-1, keepdim=True), 2 * torch.rand(ROWS, HEADS, LENGTH, steps, 1)
    decay, state = -torch.rand(ROWS, HEADS, LENGTH, 1), torch.randn(ROWS, HEADS, WIDTH, VALUES)
    actual = step_recurrence(StepInputs(q, k, v, decay if gated else None, erase), state)
    turned = [x.flatten(2, 3).transpose(1, 2) for x in (k, v, erase)]
    y, last = naive(
        q.transpose(1, 2),
        *turned[:2],
        decay.squeeze(-1).transpose(1, 2) if gated else None,
        turned[2].squeeze(-1),
        scale=1.0,
        initial_state=state,
        num_householder=steps,
    )
    torch.testing.assert_close(actual, (y.transpose(1, 2), last), rtol=1e-5, atol=1e-5)


GROUPS = RecurrentHeadsConfig(key_heads=1, value_heads=2, key_size=WIDTH, value_size=VALUES)


@pytest.mark.parametrize("kind", [DeltaConfig, GatedDeltaConfig], ids=lambda kind: kind.kind)
def test_steps_have_their_own_keys_and_values(kind: type[DeltaConfig] | type[GatedDeltaConfig]):
    """In two calls with convolutions, documents and padding, for own heads: outputs and gradients."""
    torch.manual_seed(4)
    config = kind(heads=GROUPS, short_convolution=3, convolution_bias=True, steps=2, reflect=True)
    module, plain = (form.build(7, 1).double() for form in (config, config.definition()))
    plain.load_state_dict(module.state_dict())
    heads = config.projected_heads(7, 7, 1)
    assert (heads.queries, heads.keys, heads.values) == (1, 2, 4)
    q, k, v = leaf(LENGTH, WIDTH, heads=1), leaf(LENGTH, WIDTH, heads=2), leaf(LENGTH, VALUES, heads=4)
    text = Text(config, (q, k, v))
    expected = text.read(plain)
    assert expected.shape == (ROWS, 2, LENGTH, VALUES)
    slopes = slopes_of_equal(text.read(module, 9), expected, module, plain, (q, k, v))
    assert all(x.abs().sum() > 0 for x in slopes)


def test_the_values_of_a_token_have_no_single_weight():
    module = DeltaConfig(steps=2).build(HEADS, WIDTH)
    q, k, v = (torch.randn(1, HEADS, 4, WIDTH) for _ in range(3))
    with recorded(), pytest.raises(InputError, match="output_attentions: a token of several steps"):
        module(q, k, v, Context(4, 4, causal=True), None, None)
