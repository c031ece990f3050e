"""Every pattern through compiled FlexAttention on a GPU, forward and backward, with padding and documents."""

import dataclasses

import pytest
import torch
from torch import Tensor

from attention_cases import random_context
from polyformer.attention.functional.attend import attend
from polyformer.attention.patterns import Pattern
from polyformer.core.sequence.context import Context
from registered import registered

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="it compiles for a CUDA device")

LENGTH = 300
PATTERNS = [example for cls in registered(Pattern.registry) for example in cls.examples()]


def run(pattern: Pattern, context: Context, inputs: list[Tensor], backend: str) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, pattern=pattern, context=context, backend=backend)
    weights = torch.linspace(0.5, 1.5, out.shape[-1]).to(out)
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("limits", ["", "padding", "documents"])
def test_a_pattern_compiled_for_a_gpu_is_its_definition(pattern: Pattern, limits: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, LENGTH, 32) for _ in range(3)]
    asked = {name: limits == name for name in ("documents", "padding")}
    context = random_context(2, LENGTH, LENGTH, causal=pattern.causal(), **asked)
    expected = run(pattern, context, [x.double() for x in inputs], "definition")
    tensors = {
        field.name: value.cuda()
        for field in dataclasses.fields(context)
        if isinstance(value := getattr(context, field.name), Tensor)
    }
    ours = run(pattern, dataclasses.replace(context, **tensors, memo={}), [x.cuda() for x in inputs], "flex")
    for tensor, exact in zip(ours, expected):
        assert (tensor.cpu() - exact).norm() <= 1e-3 * exact.norm().clamp(1.0)
