"""Products with int8 weights: every way is the definition, up to the rounding that it documents."""

import copy
import dataclasses
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairwise import pairwise
from polyformer.core.errors import InputError
from polyformer.core.ops import int8
from polyformer.core.ops import int8 as integer_products
from polyformer.core.ops.int8 import (
    LIBRARIES,
    Int8Config,
    Int8Embedding,
    Int8Linear,
    Int8Weight,
    StackedWeights,
    as_matrix,
    dequantized,
    has_integer_products,
    matrix_product,
    quantized,
)
from polyformer.core.ops.linear import Linear, linears
from polyformer.core.ops.quantized import dequantized_product, has_fast_product
from polyformer.core.recorded_graph import record
from tolerances import assert_rounded

SHAPES = [(1, 5, 3), (2, 64, 50), (7, 33, 129), (33, 300, 331), (130, 96, 64)]
WAYS = {
    "halves": Int8Config(),
    "fbgemm": Int8Config(several="fbgemm", integers=1 << 30),
    "onednn": Int8Config(several="onednn", integers=1 << 30),
    "chunks": Int8Config(integers=0),
}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


def bound(way: str, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """How far a way may be from the definition y, by the sizes of what is summed."""
    sums = x.abs() @ weight.abs().T
    if way == "halves" and len(sums) == 1:
        return 2**-8 * sums + 2**-8 * y.abs()
    rounding = 1e-5 * sums + 1e-6
    if way in LIBRARIES:
        levels = LIBRARIES["fbgemm" if len(sums) == 1 else way].levels
        step = x.abs().amax(-1, keepdim=True) / (4 * levels**2)
        rounding = rounding + step * weight.abs().sum(1)
    return rounding


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "halves":
        monkeypatch.setattr(int8, "has_integer_products", lambda: False)
    elif request.param in LIBRARIES and not LIBRARIES[request.param].is_exact:
        pytest.skip("torch or the processor has no such products")
    monkeypatch.setitem(int8.SECTION.by_threads, torch.get_num_threads(), WAYS[request.param])
    return request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_at_most_half_a_step(dtype: torch.dtype):
    weight = drawn(40, 30).to(dtype) * torch.logspace(-6, 3, 40, dtype=dtype).unsqueeze(1)
    weight[7] = 0
    integers, scale = quantized(weight)
    assert integers.dtype == torch.int8
    assert scale.dtype == dtype
    assert int(integers.min()) >= -127
    assert torch.equal(scale.bfloat16().to(dtype), scale), "eight bits, the same in every type"
    step = weight.double().abs().amax(1, keepdim=True) / 127
    error = (dequantized(integers.double(), scale.double()) - weight.double()).abs()
    assert bool((error <= step * (0.5 + 2**-7)).all())
    assert not integers[7].any()


def test_weights_that_are_not_finite_are_refused():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="NaN or infinity"):
            quantized(torch.tensor([[1.0, bad]]))


@torch.no_grad()
@pytest.mark.parametrize(
    ("way", "shape", "biased"), pairwise([*WAYS], SHAPES, [True, False]), indirect=["way"]
)
def test_every_way_is_the_definition(way: str, shape: tuple[int, int, int], biased: bool):
    rows, inputs, outputs = shape
    x = drawn(rows, inputs)
    x[0] *= 1000
    x[-1] = 0 if rows > 1 else x[-1]
    linear = Linear(inputs, outputs, bias=biased)
    layer = Int8Linear(linear.weight, linear.bias)
    weight, bias = layer.dequantized().double(), None if layer.bias is None else layer.bias.double()
    expected = F.linear(x.double(), weight, bias)
    got = layer(x)
    assert got.dtype == torch.float32
    assert bool(((got - expected).abs() <= bound(way, x.double(), weight, expected)).all())
    exact = layer.product(x, layer.bias)
    allowed = bound("chunks" if way == "halves" else way, x.double(), weight, expected)
    assert bool(((exact - expected).abs() <= allowed).all()), "logits are never computed in halves"


@torch.no_grad()
@pytest.mark.parametrize("way", ["fbgemm", "onednn", "chunks"], indirect=True)
def test_a_row_depends_on_no_other(way: str):
    layer, x = Int8Linear(drawn(70, 64), None), drawn(9, 64)
    alone = torch.cat([layer(row.expand(2, -1))[:1] for row in x.split(1)])  # several rows, one library
    exact = F.linear(x.double(), layer.dequantized().double())

    def same(together: torch.Tensor, rows: list[int]) -> None:
        if way == "chunks":  # torch sums a product of many rows in another order
            assert_rounded(together, alone[rows], exact[rows])
        else:
            assert torch.equal(together, alone[rows])

    same(layer(x), [*range(9)])
    x[3], x[5] = float("nan"), float("inf")
    bad = layer(x)
    assert not bad[[3, 5]].isfinite().any()
    good = [0, 1, 2, 4, 6, 7, 8]
    same(bad[good], good)


@torch.no_grad()
def test_layers_of_one_input_are_one_product(way: str, monkeypatch: pytest.MonkeyPatch):
    layers = [Int8Linear(drawn(n, 64), drawn(n) if n > 8 else None) for n in (16, 8, 24)]
    x = drawn(3, 2, 64)
    expected = [layer(x) for layer in layers]
    calls: list[int] = []
    real = int8.StackedWeights.product
    monkeypatch.setattr(int8.StackedWeights, "product", lambda *a, **k: calls.append(1) or real(*a, **k))
    for got, wanted in zip(linears(x, layers), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2 if way == "halves" else 1e-5, atol=1e-4)
    assert len(calls) == 1
    layers[1].register_forward_hook(lambda *_: None)
    linears(x, layers)
    assert len(calls) == 4, "a layer that is watched is called"


@torch.no_grad()
def test_what_was_joined_follows_the_weights(way: str):
    layer, other, x = Int8Linear(drawn(16, 64), drawn(16)), Int8Linear(drawn(17, 64)[:16], None), drawn(2, 64)
    first = layer(x)
    assert layer.bias is not None
    layer.bias.add_(1)
    torch.testing.assert_close(layer(x), first + 1, rtol=1e-2, atol=1e-4)
    layer.load_state_dict({**other.state_dict(), "bias": torch.zeros(16)})
    torch.testing.assert_close(layer(x), other(x), rtol=1e-5, atol=1e-4)
    layer.weight = layer.weight.flip(0)
    layer.scale = layer.scale.flip(0)
    torch.testing.assert_close(layer(x), other(x).flip(-1), rtol=1e-5, atol=1e-4)


def test_gradients_reach_the_input_by_the_definition():
    layer, x = Int8Linear(drawn(16, 64), drawn(16)), drawn(2, 64).double().requires_grad_()
    assert not has_fast_product(x, layer.weight)
    layer = layer.double()
    assert torch.autograd.gradcheck(layer, x)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_tables_give_their_rows_and_are_read_as_matrices():
    weight, ids, x = drawn(12, 32), torch.tensor([[1, 5], [11, 0]]), drawn(3, 32)
    table = Int8Embedding(weight)
    assert torch.equal(table(ids), table.dequantized()[ids])
    assert as_matrix(weight) is weight
    expected = dequantized_product(x, table.dequantized(), None)
    torch.testing.assert_close(matrix_product(x, table, None), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(matrix_product(x, as_matrix(table), None), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_floating_type_changes_no_weight(dtype: torch.dtype):
    layer, x = Int8Linear(drawn(16, 64), drawn(16)), drawn(2, 64)
    cast = copy.deepcopy(layer).to(dtype)
    assert torch.equal(cast.scale.float(), layer.scale)
    assert torch.equal(cast.weight, layer.weight)
    with torch.no_grad():
        got = cast(x.to(dtype))
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), layer(x), rtol=2e-2, atol=0.3)


def test_a_copy_and_a_pickle_hold_the_state_alone():
    layer, x = Int8Linear(drawn(16, 64), drawn(16)), drawn(2, 64)
    with torch.no_grad():
        expected = layer(x)
        assert layer.joined
        for twin in (copy.copy(layer), copy.deepcopy(layer)):
            assert not twin.joined
            assert torch.equal(twin(x), expected)
    assert set(layer.state_dict()) == {"weight", "scale", "bias"}


def test_threads_may_share_a_layer():
    layer, x = Int8Linear(drawn(160, 64), drawn(160)), drawn(3, 64)
    results: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            results.append(layer(x))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for other in results:
        torch.testing.assert_close(other, results[0], rtol=1e-2, atol=1e-2)


def test_compiled_code_computes_the_definition():
    layer, x = Int8Linear(drawn(16, 64), drawn(16)), drawn(2, 64)
    expected = dequantized_product(x, layer.dequantized(), layer.bias)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


def test_without_fbgemm_and_on_other_devices_nothing_is_packed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(integer_products, "ENGINES", ())
    assert not has_integer_products()
    layer, x = Int8Weight(drawn(16, 64)), drawn(2, 64)
    single, exact = (dequantized_product(y, layer.dequantized(), None) for y in (x, x.double()))
    with torch.no_grad():
        assert_rounded(layer.product(x), single, exact)
        assert not layer.joined[1].stacked._packed
    meta = copy.deepcopy(layer).to("meta")
    assert meta.product(x.to("meta")).shape == (2, 16)


def test_the_measurement_chooses_some_way_for_every_number_of_rows():
    config = int8.SECTION.measured()
    if has_integer_products():
        assert int8.FEW <= config.integers <= max(int8.ROWS)
        assert LIBRARIES[config.several].is_exact
    assert isinstance(int8._ones(2, 3), StackedWeights)


@torch.no_grad()
@pytest.mark.parametrize("way", LIBRARIES, indirect=True)
def test_a_graph_multiplies_by_the_weight_in_the_format_of_the_library(way: str):
    layer, x = Int8Linear(drawn(16, 64), drawn(16)), drawn(3, 64)
    layer(x)  # packs the weight
    graph = record(lambda x: (layer(x),), [x])
    assert "integer_product" in graph.module.code
    other = drawn(3, 64) * 5 - 1
    assert torch.equal(graph.module(other, *graph.constants)[0], layer(other))


@torch.no_grad()
def test_a_choice_of_another_processor_is_not_used_where_sums_overflow(monkeypatch: pytest.MonkeyPatch):
    if not has_integer_products():
        pytest.skip("torch has no FBGEMM here")
    overflows = dataclasses.replace(LIBRARIES["onednn"], multiply=lambda parts, packed, scale: parts + scale)
    monkeypatch.setitem(LIBRARIES, "onednn", overflows)
    assert not overflows.is_exact
    layer, x = Int8Linear(drawn(16, 64), None), drawn(2, 64)
    with int8.SECTION.using(WAYS["fbgemm"]):
        expected = layer(x)
    with int8.SECTION.using(WAYS["onednn"]):
        assert torch.equal(layer(x), expected)


@torch.no_grad()
@pytest.mark.parametrize("biased", [True, False])
def test_the_product_of_a_gpu_is_the_definition(biased: bool):
    x, (weight, scale) = drawn(3, 2, 40).double(), quantized(drawn(30, 40).double())
    bias = drawn(30).double() if biased else None
    y, expected = (
        int8.gpu_product(x, weight, scale, bias),
        dequantized_product(x, dequantized(weight, scale), bias),
    )
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert not int8.has_gpu_product(x, weight)
