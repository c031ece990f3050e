"""K11 bfloat16 and float16: at most twice the error of dense attention, and large scores do not overflow."""

import pytest
import torch
from members import Case
from selection import cases, mechanisms
from shared_models import shared
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.sequence.context import Context
from registered import EVERYTHING

TYPES = torch.bfloat16, torch.float16
HALF = [
    (name, config, dtype)
    for name, config in mechanisms("half mechanism")
    for dtype in (TYPES if EVERYTHING or name.startswith("Mechanism-") else TYPES[:1])
]


def inputs(dtype: torch.dtype, size: float, width: int = 16) -> list[Tensor]:
    torch.manual_seed(15)
    q, k, v = (torch.randn(2, 2, 67, width).to(dtype) for _ in range(3))
    return [x.requires_grad_() for x in (q * size, k * size, v)]


def run(
    config: MechanismConfig, tensors: list[Tensor], context: Context, stored: torch.dtype | None = None
) -> list[Tensor]:
    """Output and gradients, with parameters that can be `stored`: to round them is no error of computing."""
    torch.manual_seed(16)
    mechanism = config.build(2, tensors[0].shape[3]).to(stored or tensors[0].dtype)
    y, _ = mechanism.to(tensors[0].dtype).eval()(*tensors, context, None, None)
    assert y.dtype == tensors[0].dtype
    # Not the sum of squares, which is constant for normed outputs.
    weight = torch.randn(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), tensors)]


def errors(config: MechanismConfig, tensors: list[Tensor], context: Context) -> list[tuple[float, float]]:
    """Distance from float64, and size, of the output and each gradient."""
    doubled = [x.detach().double().requires_grad_() for x in tensors]
    exact = run(config, doubled, context, tensors[0].dtype)
    actual = run(config, tensors, context)
    return [(float((a.double() - b).norm()), float(b.norm())) for a, b in zip(actual, exact)]


@pytest.mark.parametrize(("name", "config", "dtype"), HALF, ids=str)
def test_error_is_at_most_twice_that_of_dense_attention(
    name: str, config: MechanismConfig, dtype: torch.dtype
):
    context = Context(67, 67, causal=config.causal)
    for size in (0.5, 2.0):
        tensors = inputs(dtype, size)
        dense = errors(SoftmaxConfig(), tensors, context)
        for (mine, size), (theirs, dense_size) in zip(errors(config, tensors, context), dense):
            # A gradient that is exactly zero, of a query that sees one key, is measured by what others get.
            # The errors of two maps are added, while the maps with the factors 1 and -0.2 are subtracted.
            times = 3 if config.kind == "differential" else 2
            assert mine / max(size, dense_size) <= times * theirs / dense_size


@pytest.mark.parametrize(("name", "config", "dtype"), HALF, ids=str)
def test_large_scores_do_not_overflow(name: str, config: MechanismConfig, dtype: torch.dtype):
    """q k^T is beyond float16 here, though the scaled scores are not; in every form of the member."""
    tensors = [(torch.randn_like(x).sign() * 100).requires_grad_() for x in inputs(dtype, 1.0)]
    tensors[1] = tensors[0].detach().clone().requires_grad_()
    tensors[2] = (tensors[2] / 100).detach().requires_grad_()
    assert (tensors[0][0, 0, 0].double() @ tensors[1][0, 0, 0].double()) > torch.finfo(torch.float16).max
    for form in (config, config.definition()):
        for tensor in run(form, tensors, Context(67, 67, causal=config.causal)):
            assert tensor.isfinite().all()


@torch.no_grad()
def of_rounded_weights(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """The hidden states in float64 with rounded weights: far off in a model that amplifies any rounding.

    An encoder and a decoder of two layers of delta rules are one: weights alone cause an error of 8 eps.
    """
    model = case.model(torch.float64)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))
    return model(**case.labels(case.batch())).last_hidden_state


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, dtype) for case in cases("every precision") for dtype in TYPES),
        *((case, torch.bfloat16) for case in cases("precision")),
    ],
    ids=str,
)
def test_models_run_in_half_precision(case: Case, dtype: torch.dtype):
    """Near their float64 selves, forward, and finite backward."""
    batch = case.labels(case.batch())
    model, exact = case.model(dtype), shared(case)
    output, expected = model(**batch), exact(**batch).last_hidden_state
    assert output.last_hidden_state.dtype == dtype
    error = case.apart(output.last_hidden_state, expected)
    assert error < 16 * torch.finfo(dtype).eps or error < 4 * case.apart(
        of_rounded_weights(case, dtype), expected
    )
    output = model.train()(**batch) if case.adaptive else output
    value = output.loss if output.loss is not None else output.logits.float().square().sum()
    assert value.isfinite()
    value.backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for name, parameter in model.named_parameters()
        if case.learns(name)
    )
