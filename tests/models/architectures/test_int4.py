"""Products with 4-bit weights: the definition, torch's kernel and float products."""

import copy

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.linear import linears
from polyformer.core.recorded_graph import record
from polyformer.models.architectures import int4
from polyformer.models.architectures.int4 import FEW, Int4Linear, dequantized, has_kernel, quantized

SIZES = [(1, 32, 16), (3, 64, 50), (8, 33, 129), (FEW + 1, 300, 331), (2, 5, 3), (70, 96, 64)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


def exact_product(layer: Int4Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x.double(), layer.dequantized().double(), bias)


def assert_close(y: Tensor, layer: Int4Linear, x: Tensor, is_exact: bool) -> None:
    """Check y up to the rounding of float32, or of bfloat16 inputs, numbers of groups and outputs."""
    sums = x.double().abs() @ layer.dequantized().double().abs().T
    # m + 8d, rounded to 8 bits, may be larger than the weights of its group.
    q, d, m = int4.unpacked(layer.weight)
    spread = 2 * (m.abs() + 8 * d).double().repeat_interleave(q.shape[2], 1)[:, : x.shape[-1]]
    rounding = 1e-5 * sums if is_exact else 2**-8 * (sums + x.double().abs() @ spread.T)
    assert bool(((y - exact_product(layer, x)).abs() <= rounding + 1e-6).all())


def test_a_weight_is_off_by_at_most_half_a_step():
    weight = drawn(40, 70) * torch.logspace(-3, 3, 40).unsqueeze(1)
    weight[7] = 0
    blocks = quantized(weight)
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (40, 3 * int4.BLOCK), "the last group has 6 inputs"
    step = F.pad(weight, (0, 26)).view(40, 3, 32).abs().amax(2).repeat_interleave(32, 1)[:, :70] * 2 / 15
    error = (dequantized(blocks, 70) - weight).abs()
    assert bool((error <= step * (0.5 + 2**-6)).all())
    assert not dequantized(blocks, 70)[7].any()


def test_blocks_are_those_of_gguf():
    weight = drawn(12, 64)
    theirs = gguf.quants.dequantize(quantized(weight).numpy(), gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(torch.from_numpy(theirs), dequantized(quantized(weight), 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_weights_without_a_half_precision_number_are_refused(bad: float):
    with pytest.raises(InputError, match="65504"):
        quantized(torch.tensor([[1.0, bad]]))


@torch.no_grad()
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kernel", [True, False])
def test_products_are_the_definition(
    sizes: tuple[int, int, int], kernel: bool, monkeypatch: pytest.MonkeyPatch
):
    rows, inputs, outputs = sizes
    if not kernel:
        monkeypatch.setattr(int4, "has_kernel", lambda: False)
    x, weight = drawn(rows, inputs), drawn(outputs, inputs)
    for bias in (None, drawn(outputs)):
        layer = Int4Linear(weight, bias)
        y = layer(x)
        assert y.dtype == torch.float32
        assert_close(y, layer, x, not kernel or rows > FEW)
        assert_close(layer.product(x, layer.bias, exact=True), layer, x, True)


@torch.no_grad()
def test_a_row_depends_on_no_other():
    layer, x = Int4Linear(drawn(70, 64), None), drawn(9, 64)
    expected = torch.cat([layer(row) for row in x.split(1)])
    assert torch.equal(layer(x), expected)
    x[3] = float("nan")
    others = [0, 1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(layer(x)[others], expected[others])


@torch.no_grad()
@pytest.mark.parametrize("rows", [3, 40])
def test_layers_of_the_same_input_are_one_product(rows: int):
    layers = [Int4Linear(drawn(n, 64), drawn(n) if n > 8 else None) for n in (16, 8, 24)]
    x = drawn(2, rows, 64)
    for y, layer in zip(linears(x, layers), layers, strict=True):
        torch.testing.assert_close(y, layer(x), rtol=1e-5, atol=1e-5)
    assert len(layers[0].joined) == 2
    layers[1].weight = layers[1].weight.flip(0)
    torch.testing.assert_close(linears(x, layers)[1], layers[1](x), rtol=1e-5, atol=1e-5)


def test_gradients_reach_the_input_by_the_definition():
    layer, x = Int4Linear(drawn(16, 40), drawn(16)).double(), drawn(2, 40).double().requires_grad_()
    assert torch.autograd.gradcheck(layer, x)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_floating_type_changes_no_weight(dtype: torch.dtype):
    layer, x = Int4Linear(drawn(16, 64), drawn(16)), drawn(2, 64)
    cast = copy.deepcopy(layer).to(dtype)
    assert torch.equal(cast.weight, layer.weight)
    y = cast(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), layer(x), rtol=2e-2, atol=0.3)


@torch.no_grad()
def test_a_graph_has_the_product_of_the_kernel():
    if not has_kernel():
        pytest.skip("torch has no vectorized kernel here")
    layer, x = Int4Linear(drawn(16, 64), drawn(16)), drawn(3, 64)
    layer(x)  # packs the weight
    graph = record(lambda x: (layer(x),), [x])
    assert "int4pack" in graph.module.code
    other = drawn(3, 64) * 5 - 1
    assert torch.equal(graph.module(other, *graph.constants)[0], layer(other))


def test_the_definition_needs_no_memory_on_meta():
    layer = Int4Linear(torch.empty(16, 40, device="meta"), None)
    assert layer.weight.shape == (16, 2 * int4.BLOCK)
    assert layer(torch.empty(2, 40, device="meta")).shape == (2, 16)
