"""The product of a single row in graphs equals its definition, compiled and not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.ops.linear import Linear
from polyformer.core.recorded_graph import record
from polyformer.models.generation.packed_weights import PackedCopies, PackedWeights

TOLERANCE = {torch.float64: 1e-13, torch.bfloat16: 0.02}
PRODUCT = torch.ops.polyformer.row_product.default


def layers() -> list[nn.Linear]:
    """Layers in float64 of odd sizes, with and without a bias."""
    torch.manual_seed(0)
    both = Linear(301, 67), Linear(301, 9, bias=False)
    return [layer.double().requires_grad_(False) for layer in both]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_graph_of_a_single_row_gives_the_products_of_torch(dtype, is_compiled):
    first, second = (layer.to(dtype) for layer in layers())
    packed = PackedWeights(PackedCopies())

    def read(x: Tensor) -> tuple[Tensor, ...]:
        with packed:
            x = x.sin()
            return packed.activated(x, first, "gelu"), *packed.linears(x, [first, second])

    x = torch.randn(1, 1, 301, dtype=dtype)
    with torch.no_grad():
        graph = record(read, [x])
        assert sum(node.target is PRODUCT for node in graph.module.graph.nodes) == 3
        run = graph.compiled([x]) if is_compiled else lambda x: graph.module(x, *graph.constants)
        for inputs in (x, -2 * x):
            exact = [layer(inputs.sin().double()) for layer in layers()]
            for y, expected in zip(run(inputs), [F.gelu(exact[0]), *exact], strict=True):
                assert y.dtype == dtype
                torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_other_products_use_a_library():
    first, _ = layers()
    transposed = nn.Parameter(first.weight.T.contiguous().T, requires_grad=False)
    packed = PackedWeights(None)

    def read(x: Tensor) -> tuple[Tensor, ...]:
        with packed:
            return packed.linear(x, first.weight, None), packed.linear(x[:1], transposed, None)

    with torch.no_grad():
        graph = record(read, [torch.randn(2, 301, dtype=torch.float64)])
    assert all(node.target is not PRODUCT for node in graph.module.graph.nodes)
