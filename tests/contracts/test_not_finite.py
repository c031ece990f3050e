"""What a query may not see cannot reach it, not even as NaN or infinity: 0 times NaN is NaN.

Of mechanisms outside `attend`, whose backends have tests of their own.
"""

import dataclasses
import math

import pytest
import torch
from members import assert_same
from selection import mechanisms
from torch import Tensor

from polyformer.attention.mechanisms import AdaptiveSpanConfig, AlternateConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.sequence.context import Context

LENGTH = 13
OWN = [
    (name, config)
    for name, config in mechanisms("mechanism")
    if not isinstance(config, SoftmaxConfig | AdaptiveSpanConfig | AlternateConfig)
]

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8]).expand(2, -1)
VALID = torch.arange(LENGTH).expand(2, -1) < 8
PLACES = {
    "future": (Context(LENGTH, LENGTH, causal=True), slice(0, 8), slice(8, LENGTH)),
    "padding": (Context(LENGTH, LENGTH, kv_valid=VALID), slice(0, 8), slice(8, LENGTH)),
    "documents": (Context(LENGTH, LENGTH, q_doc=DOCUMENTS, kv_doc=DOCUMENTS), slice(5, LENGTH), slice(0, 5)),
}
"""A context, the tokens that are looked at, and those they may not attend to."""

NEEDED = {"future": "causal", "padding": None, "documents": "supports_packing"}
"""The ability without which a mechanism refuses such a context."""


def run(config: MechanismConfig, inputs: list[Tensor], context: Context, real: slice) -> list[Tensor]:
    """The outputs that are looked at, and all gradients of them."""
    torch.manual_seed(6)
    mechanism = config.build(2, 4).to(inputs[0].dtype).eval()
    for parameter in mechanism.parameters():
        torch.nn.init.normal_(parameter)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    y, _ = mechanism(*leaves, dataclasses.replace(context, memo={}), None, None)
    y = y[:, :, real]
    weight = torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)
    learned = [*leaves, *mechanism.parameters()]
    slopes = torch.autograd.grad((y * weight).sum(), learned, allow_unused=True)
    return [y, *(torch.zeros_like(x) if slope is None else slope for x, slope in zip(learned, slopes))]


@pytest.mark.parametrize(
    ("name", "config", "place"),
    [
        (name, config, place)
        for name, config in OWN
        for place, ability in NEEDED.items()
        if ability is None or getattr(config, ability)
    ],
)
def test_what_may_not_be_seen_does_not_reach(name: str, config: MechanismConfig, place: str):
    context, real, hidden = PLACES[place]
    for form in (config, config.definition()):
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(5)
            inputs = [torch.randn(2, 2, LENGTH, 4, dtype=dtype) for _ in range(3)]
            expected = run(form, inputs, context, real)
            for group in (inputs, expected[1:4]):  # a token that is not looked at has no gradient
                assert all(tensor.isfinite().all() for tensor in group)
            for value in (math.nan, math.inf):
                corrupted = [tensor.clone() for tensor in inputs]
                for tensor in corrupted:
                    tensor[:, :, hidden] = value
                for actual, wanted in zip(run(form, corrupted, context, real), expected):
                    assert_same(actual, wanted, 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize(("name", "config"), OWN)
def test_what_is_seen_shows(name: str, config: MechanismConfig):
    """No number is made up for a query that sees something not finite, or is not finite itself."""
    context = PLACES["padding"][0]
    torch.manual_seed(5)
    inputs = [torch.randn(2, 4, LENGTH, 4) for _ in range(3)]
    inputs[0][0, 0, 3] = math.nan
    inputs[2][1, 1, :8] = math.inf
    mechanism = config.build(4, 4).eval()
    y, _ = mechanism(*inputs, dataclasses.replace(context, memo={}), None, None)
    assert y[0, 0, 3].isnan().all()
    assert y[0, 1].isfinite().all()
    sees = y[1, 1, :8].isnan().all(-1)
    assert sees.any()
    weights = (y[1, 1, :8] == 0).all(-1)  # a query may see nothing
    assert (sees | weights).all()
