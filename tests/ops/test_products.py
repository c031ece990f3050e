"""Batched products: the same as torch's, and never by oneDNN's slow way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyformer.ops import products
from polyformer.ops.products import product

HEADS = torch.randn(1, 512, 4, 64, generator=torch.Generator().manual_seed(0)).transpose(1, 2)[0]
"""Heads [4, 512, 64] as a model has them: cut out of [tokens, heads, width], with gaps between the rows."""


class Weights(TorchDispatchMode):
    """Notes the second operands that reach oneDNN."""

    def __init__(self):
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transposed", [True, False])
def test_heads_are_made_dense_before_onednn_takes_them(transposed: bool, monkeypatch: pytest.MonkeyPatch):
    """It takes rows with gaps by its reference code, 400 times as slow: 440 ms in place of one."""
    monkeypatch.setattr(products, "SMALLEST", 1)
    a = torch.randn(4, 128 if transposed else 256, 64 if transposed else 512)
    b = HEADS.mT if transposed else HEADS
    with Weights() as weights:
        result = product(a, b)
    torch.testing.assert_close(result, torch.bmm(a, b), rtol=1e-4, atol=1e-3)
    assert len(weights.found) == 4
    assert all(weight.is_contiguous() or weight.mT.is_contiguous() for weight in weights.found)
