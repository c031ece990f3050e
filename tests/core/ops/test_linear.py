"""The linear layer is `F.linear`, whichever library computes it."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

from pairwise import pairwise
from polyformer.core.ops.layers import ACTIVATIONS
from polyformer.core.ops.linear import (
    COPIED,
    JointProducts,
    Linear,
    activated,
    joint_linear,
    linear,
    linears,
    onednn_takes,
)
from polyformer.core.ops.product_kernels import ROW_STEP
from polyformer.models.generation.packed_weights import (
    LAYOUTS,
    LayoutConfig,
    PackedCopies,
    PackedWeights,
    packs_bfloat16,
)
from product_choices import EVERY_WAY, by
from tolerances import assert_rounded


@pytest.fixture(autouse=True)
def _by_onednn():
    """What is tested here is what oneDNN computes, also where plain torch is faster."""
    with by("onednn"):
        yield


SHAPES = [(1, 5, 3), (7, 16, 33), (33, 8, 1), (2, 64, 50), (1, 300, 331), (9, 257, 301)]


def inputs(rows: int, wide: int, out: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(*shape, generator=generator, dtype=dtype)
        for shape in ((rows, 3, wide), (out, wide), (out,))
    ]


def of_torch(arguments: list[torch.Tensor], upstream: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """The value, the gradients and the value again by torch's own operation, in `dtype`."""
    arguments = [tensor.detach().to(dtype).requires_grad_() for tensor in arguments]
    value = F.linear(*arguments)
    return [value, *torch.autograd.grad(value, arguments, upstream.to(dtype)), value]


@pytest.mark.parametrize(
    ("shape", "dtype", "bias", "way"),
    pairwise(SHAPES, [torch.float32, torch.float64], [True, False], EVERY_WAY),
)
def test_values_and_gradients_are_those_of_torch(shape, dtype, bias, way):
    x, weight, offset = inputs(*shape, dtype)
    arguments = [tensor.requires_grad_() for tensor in (x, weight, offset)[: 3 if bias else 2]]
    upstream = torch.randn(*x.shape[:-1], shape[2], dtype=dtype, generator=torch.Generator().manual_seed(9))
    with by(way):
        got = linear(*arguments)
        results = [got, *torch.autograd.grad(got, arguments, upstream)]
        with torch.no_grad():
            results.append(linear(*arguments))
    single, exact = (of_torch(arguments, upstream, wide) for wide in (dtype, torch.float64))
    for ours, theirs, value in zip(results, single, exact, strict=True):
        if dtype == torch.float64:
            torch.testing.assert_close(ours, value, rtol=1e-12, atol=1e-11)
        else:
            assert_rounded(ours, theirs, value)


def test_only_the_gradients_asked_for_are_made():
    x, weight, offset = inputs(4, 5, 6)
    linear(x, weight.requires_grad_(), offset).sum().backward()
    assert weight.grad is not None
    assert x.grad is None
    assert not linear(x, weight.detach(), offset).requires_grad


def test_second_derivatives_are_those_of_torch():
    x, weight, offset = (tensor.requires_grad_() for tensor in inputs(4, 5, 6))

    def second(function):
        (first,) = torch.autograd.grad(function(x, weight, offset).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (x, weight))

    for ours, theirs in zip(second(linear), second(F.linear)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[0, 0]])
def test_any_strides_will_do(view):
    x, weight, offset = inputs(6, 8, 5)
    torch.testing.assert_close(
        linear(view(x), weight, offset), F.linear(view(x), weight, offset), rtol=1e-5, atol=1e-5
    )
    transposed = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).T
    torch.testing.assert_close(
        linear(x, transposed, offset), F.linear(x, transposed, offset), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rows", [1, 22, ROW_STEP])
def test_what_it_returns_may_be_changed_in_place(rows):
    x, weight, offset = (tensor.requires_grad_() for tensor in inputs(rows, 257, 301))
    with torch.no_grad():
        later = linear(x, weight, offset)
    for y in (linear(x, weight, offset), F.linear(x, weight, offset)):
        y += 1
        y.square().sum().backward()
    later += weight.sum()
    assert later.requires_grad
    total = (F.linear(x, weight, offset) + 1).square().sum()
    for tensor, expected in zip((x, weight, offset), torch.autograd.grad(total, (x, weight, offset))):
        torch.testing.assert_close(tensor.grad, 2 * expected, rtol=1e-4, atol=1e-2)


def test_no_rows_give_no_rows():
    _, weight, offset = inputs(6, 8, 5)
    assert linear(torch.zeros(0, 8), weight, offset).shape == (0, 5)


def test_onednn_is_left_where_it_does_not_follow():
    x, weight, _ = inputs(2, 4, 4)
    assert not onednn_takes(x.double(), weight.double())
    assert not onednn_takes(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not onednn_takes(x, weight)
        assert linear(x, weight).dtype == torch.bfloat16
    batched = torch.func.vmap(linear, in_dims=(0, None))(x, weight)
    torch.testing.assert_close(batched, F.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_the_layer_is_torchs_with_another_product():
    layer = Linear(8, 5)
    assert set(layer.state_dict()) == {"weight", "bias"}
    x = inputs(3, 8, 5)[0]
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


LAYOUT_CONFIGS = [
    LayoutConfig(single="row", several="onednn"),
    *([LayoutConfig(single="onednn", several="mkl")] if torch.backends.mkl.is_available() else []),
]


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("config", [None, *LAYOUT_CONFIGS])
def test_packed_weights_give_the_same_products(config, rows):
    x, weight, offset = inputs(5, 300, 400)
    weight = torch.nn.Parameter(weight)
    packed = PackedWeights(None if config is None else PackedCopies(), rows)
    with LAYOUTS.using(config or LayoutConfig()):
        for some in (x, x[0], x[:1, :1], x[0, :2].T.contiguous().T, x.repeat(20, 1, 1), x[:0]):
            for bias in (offset, None):
                with packed:
                    y = linear(some, weight, bias)
                torch.testing.assert_close(y, F.linear(some, weight, bias), rtol=1e-5, atol=1e-4)
    if packed.copies is not None:
        assert list(packed.copies.kept) == [(id(weight),)], "one copy serves all"


@torch.no_grad()
def test_a_copy_is_replaced_by_a_copy_for_another_number_of_rows():
    weight, copies = torch.nn.Parameter(inputs(1, 300, 400)[1]), PackedCopies()
    with LAYOUTS.using(LAYOUT_CONFIGS[-1]):
        first = copies.of(4, [weight])
        assert first is not None
        assert copies.of(3, [weight]) is first
        assert copies.of(4, [weight]) is first
        assert first.packed.layout == "onednn" or copies.of(5, [weight]) is not first
    with LAYOUTS.using(LAYOUT_CONFIGS[0]):
        single = copies.of(1, [weight])
        assert single is not None
        assert single.packed.layout == "row"
        assert copies.of(2, [weight]) is not single
    assert list(copies.kept) == [(id(weight),)]


def test_the_measured_layouts_fit_this_machine():
    choice = LAYOUTS.measured()
    assert choice.single in ("row", "onednn")
    assert choice.several in ("mkl", "onednn")
    assert torch.backends.mkl.is_available() or choice.several == "onednn"


@torch.no_grad()
def test_weights_of_bfloat16_are_packed_where_onednn_has_its_products():
    x, weight, offset = inputs(5, 300, 401, torch.bfloat16)
    weight, packed = torch.nn.Parameter(weight), PackedWeights(PackedCopies())
    assert packed.copies is not None
    expected = F.linear(x.double(), weight.double(), offset.double())
    with packed:
        for rows in (x, x[:1], x.repeat(40, 1, 1)):
            y = linear(rows, weight, offset)
            assert y.dtype == torch.bfloat16
            torch.testing.assert_close(y[:5].double(), expected[: len(y)], rtol=2e-2, atol=2e-1)
        linear(x.float(), torch.nn.Parameter(weight.float()))
    assert ((id(weight),) in packed.copies.kept) == packs_bfloat16()
    assert len(packed.copies.kept) == 1 + packs_bfloat16()


@torch.no_grad()
def test_weights_are_packed_inside_alone_and_up_to_the_limit():
    x, weight, _ = inputs(5, 300, 400)
    first, second = torch.nn.Parameter(weight), torch.nn.Parameter(weight + 1)
    copies = PackedCopies(limit=first.nbytes)
    linear(x, first)
    assert not copies.kept
    with PackedWeights(copies):
        linear(x, weight)  # no parameter: nobody says how long it lives
        linear(x, first)
        torch.testing.assert_close(linear(x, second), F.linear(x, second), rtol=1e-5, atol=1e-4)
    assert list(copies.kept) == [(id(first),)]
    first.mul_(2)
    torch.testing.assert_close(linear(x, first), F.linear(x, first), rtol=1e-5, atol=1e-4)


WRITES = {
    "one number": lambda weight: weight.data[3, 5].mul_(1 + 1e-6),
    "all numbers": lambda weight: weight.data.neg_(),
    "through numpy": lambda weight: weight.detach().numpy().__setitem__((0, 0), 7.0),
    "rows in another order": lambda weight: weight.data.copy_(weight.data.flip(0)),
    "columns in another order": lambda weight: weight.data.copy_(weight.data.roll(2, 1)),
    "other data": lambda weight: setattr(weight, "data", torch.ones_like(weight)),
    "another type": lambda weight: setattr(weight, "data", weight.data.double()),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("write", "width", "dtype"), pairwise([*WRITES], [300, 301], [torch.float32, torch.bfloat16])
)
def test_copies_of_weights_that_were_written_to_are_dropped(write, width, dtype):
    if dtype == torch.bfloat16 and (write in ("one number", "through numpy") or not packs_bfloat16()):
        pytest.skip("too small a step, no such numbers, or no such copies")
    other, weight = Linear(width, 401).to(dtype), Linear(width, 401).weight.to(dtype)
    copies = PackedCopies()
    for change in (lambda weight: None, WRITES[write]):
        for each in (other.weight, weight):
            copies.of(1, [each])
        change(weight)
        copies.drop_changed([other.weight, weight])
    assert list(copies.kept) == [(id(other.weight),)]
    copies.drop_changed([weight])
    assert not copies.kept, "no parameter of the model any more"


def test_under_autograd_no_copy_is_read():
    x, weight, _ = inputs(5, 300, 400)
    copies = PackedCopies()
    with PackedWeights(copies):
        linear(x, torch.nn.Parameter(weight)).sum().backward()
    assert not copies.kept


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "rows"),
    [(name, rows) for i, name in enumerate(ACTIVATIONS) for rows in ((0, 8), (1, 200))[i % 2]],
)
def test_an_activation_is_computed_with_the_product(name, rows):
    layer = Linear(300, 401)
    x = torch.randn(rows, 1, 300, generator=torch.Generator().manual_seed(rows)) * 5
    single, exact = (
        ACTIVATIONS[name](F.linear(*(tensor.to(dtype) for tensor in (x, layer.weight, layer.bias))))
        for dtype in (torch.float32, torch.float64)
    )
    for copies in (PackedCopies(), None):
        with PackedWeights(copies):
            assert_rounded(activated(x, layer, name), single, exact)
    assert_rounded(activated(x, layer, name), single, exact)
    layer.register_forward_hook(lambda *_: torch.ones(1))
    with PackedWeights(None):
        torch.testing.assert_close(activated(x, layer, name), ACTIVATIONS[name](torch.ones(1)))


class Shapes(TorchDispatchMode):
    """Notes the shapes of the products that reach oneDNN."""

    def __init__(self):
        super().__init__()
        self.found: set[tuple[torch.Size, torch.Size]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.mkldnn._linear_pointwise.default:
            self.found.add((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


def test_batches_of_many_lengths_meet_few_shapes():
    """Every shape costs oneDNN a kernel that it keeps: training on text once took gigabytes for them."""
    weight = torch.randn(300, 256, requires_grad=True)
    with Shapes() as shapes:
        for rows in range(2 * ROW_STEP + 1, 3 * ROW_STEP + 1, 7):
            x = torch.randn(rows, 256, requires_grad=True)
            linear(x, weight).square().sum().backward()
            plain = torch.autograd.grad(F.linear(x, weight).square().sum(), x)[0]
            torch.testing.assert_close(x.grad, plain, rtol=1e-4, atol=1e-3)
    assert len(shapes.found) == 3, "forward, and one for each gradient"


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 5])
def test_layers_of_one_input_are_read_as_one(rows):
    layers = [Linear(300, 400), Linear(300, 200, bias=False), Linear(300, 200)]
    x = torch.randn(1, 9, 300, generator=torch.Generator().manual_seed(rows))
    expected = [F.linear(x, layer.weight, layer.bias) for layer in layers]
    packed = PackedWeights(PackedCopies(), rows)
    with packed:
        for read in (rows, rows, 9):
            for got, wanted in zip(linears(x[:, :read], layers), expected):
                torch.testing.assert_close(got, wanted[:, :read], rtol=1e-5, atol=1e-4)
    assert packed.copies is not None
    sources = [*(layer.weight for layer in layers), layers[0].bias, layers[2].bias]
    assert list(packed.copies.kept) == [tuple(map(id, sources))]
    packed.copies.drop_changed(sources)
    assert packed.copies.kept
    layers[2].bias.data.add_(1)
    packed.copies.drop_changed(sources)
    assert not packed.copies.kept, "the copy has the biases too"
    expected[2] += 1
    for got, wanted in zip(linears(x, layers), expected):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_a_layer_that_is_watched_or_no_linear_layer_runs_by_itself():
    x = inputs(5, 300, 400)[0]
    for change in (lambda layer: layer.register_forward_hook(lambda *_: None), lambda layer: layer.double()):
        layers = [Linear(300, 400), Linear(300, 400)]
        change(layers[1])
        if layers[1].weight.dtype == torch.float64:
            layers = [layer.double() for layer in layers]
        packed = PackedWeights(PackedCopies())
        with packed:
            got = linears(x.to(layers[0].weight.dtype), layers)
        assert len(got) == 2
        assert list(packed.joints.values()) == [None]
    for copies in (PackedCopies(limit=10), None):
        packed = PackedWeights(copies)
        with packed:
            linears(x, [Linear(300, 400), Linear(300, 400)])
        assert list(packed.joints.values()) == [None], "no room, or no copies wanted"


@pytest.mark.parametrize("bias", [True, False])
def test_small_layers_of_one_input_are_one_product_with_the_same_gradients(bias):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    layers = [Linear(7, width, bias=bias).double() for width in (3, 1, 9)]
    joint = joint_linear(x, layers)
    assert joint is not None
    apart = torch.cat([layer(x) for layer in layers], -1)
    torch.testing.assert_close(joint, apart, rtol=1e-12, atol=1e-12)
    sources = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    for got, wanted in zip(
        torch.autograd.grad(joint.sin().sum(), sources), torch.autograd.grad(apart.sin().sum(), sources)
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # a change without a trace is seen
        layers[1].weight.data.mul_(2)
        torch.testing.assert_close(joint_linear(x, layers), torch.cat([layer(x) for layer in layers], -1))


CHANGES = {
    "a forward hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "a backward hook": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "a replaced forward": lambda layer: setattr(layer, "forward", layer.forward),
    "pruning": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "a parametrization": lambda layer: parametrizations.weight_norm(layer),
    "a missing bias": lambda layer: layer.register_parameter("bias", None),
    "another class": lambda layer: setattr(layer, "__class__", torch.nn.Linear),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_is_not_plain_is_in_no_joint_product(change):
    x, layers = torch.randn(4, 6), [Linear(6, 6), Linear(6, 6)]
    change(layers[1])
    assert joint_linear(x, layers) is None
    assert torch.equal(linears(x, layers)[1], layers[1](x))


@pytest.mark.parametrize("backend", [JointProducts, lambda: PackedWeights(PackedCopies())])
@torch.no_grad()
def test_a_replaced_forward_runs_while_decoding(backend):
    """As accelerate replaces it where weights are offloaded: they are only there during the call."""
    x, layers = torch.randn(4, 6), [Linear(6, 6), Linear(6, 6)]
    for layer in layers:
        layer.forward = lambda x, layer=layer: F.linear(x, layer.weight + 1, layer.bias)
    expected = [layer(x) for layer in layers]
    with backend():
        for got, wanted in zip(linears(x, layers), expected, strict=True):
            torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(activated(x, layers[0], "relu"), expected[0].relu())


def test_large_layers_are_not_copied_at_every_call():
    assert joint_linear(torch.randn(2, COPIED), [Linear(COPIED, 1), Linear(COPIED, 1)]) is not None
    assert joint_linear(torch.randn(2, COPIED), [Linear(COPIED, 1), Linear(COPIED, 2)]) is None
