"""Feed-forwards: dense, gated, in chunks, and convolutions."""

from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer import create_model
from polyformer.attention.positions.by_distance import AlibiConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.block import ReversibleConfig
from polyformer.nn.feedforward import ChunkedConfig, DenseConfig, ExpertsConfig, FeedForward, GatedConfig
from polyformer.nn.feedforward.feedforward import SeparableConvolution, SeparableConvolutionConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import StackConfig

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0.0),
}


@pytest.mark.parametrize(("activation", "bias"), [*zip(ACTIVATIONS, cycle([True, False]))])
def test_dense(activation: str, bias: bool):
    torch.manual_seed(0)
    module = DenseConfig(intermediate_size=7, activation=activation, bias=bias).build(3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    inner = ACTIVATIONS[activation](F.linear(x, module.up.weight, module.up.bias))
    expected = F.linear(inner, module.down.weight, module.down.bias)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert len(list(module.parameters())) == (4 if bias else 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["sigmoid", "gelu", "silu"])
def test_gated(activation: str, bias: bool):
    """GLU, GEGLU and SwiGLU."""
    torch.manual_seed(0)
    module = GatedConfig(intermediate_size=7, activation=activation, bias=bias).build(3).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    gate = ACTIVATIONS[activation](F.linear(x, module.gate.weight, module.gate.bias))
    inner = gate * F.linear(x, module.up.weight, module.up.bias)
    expected = F.linear(inner, module.down.weight, module.down.bias)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
    assert len(list(module.parameters())) == (6 if bias else 3)


def test_the_clamped_gate_of_gpt_oss():
    """The gate has an upper bound, the other projection a bound on both sides; 1 is added to the latter."""
    torch.manual_seed(0)
    config = GatedConfig(intermediate_size=7, activation="quick_gelu", bias=True, clamp=0.4, up_offset=1.0)
    module, x = config.build(3).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    gate = F.linear(x, module.gate.weight, module.gate.bias)
    up = F.linear(x, module.up.weight, module.up.bias)
    limit = torch.tensor(0.4, dtype=torch.float64)
    gate, up = gate.minimum(limit), up.minimum(limit).maximum(-limit)
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    expected = F.linear(inner, module.down.weight, module.down.bias)
    assert gate.min() < -limit
    assert gate.max() == limit
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def test_unknown_activations_are_named():
    with pytest.raises(InputError, match="unknown activation 'rleu': did you mean 'relu'"):
        DenseConfig(activation="rleu")
    with pytest.raises(InputError, match="intermediate_size: expected 1 or more, got 0"):
        GatedConfig(intermediate_size=0)


def results(module: FeedForward) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many numbers were kept for the backward pass."""
    x = torch.linspace(-1, 1, 2 * 11 * 3, dtype=torch.float64).view(2, 11, 3).requires_grad_()
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])], sum(saved.values())


@pytest.mark.parametrize("chunk", [1, 4, 22, 1000])
@pytest.mark.parametrize("inner", [DenseConfig(intermediate_size=40), GatedConfig(intermediate_size=40)])
def test_chunks_change_no_number_and_keep_none(inner: DenseConfig | GatedConfig, chunk: int):
    torch.manual_seed(0)
    whole = inner.build(3).double().train()
    parts = ChunkedConfig(inner=inner, chunk=chunk).build(3).double().train()
    parts.inner.load_state_dict(whole.state_dict())
    expected, kept = results(whole)
    chunked, fewer = results(parts)
    for actual, wanted in zip(chunked, expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    assert kept > 22 * 40
    assert fewer <= 2 * 22 * 3, "the input alone"


def test_wrong_chunks_are_named():
    with pytest.raises(InputError, match="chunk: expected 1 or more, got 0"):
        ChunkedConfig(chunk=0)
    with pytest.raises(InputError, match="inner: 'experts' reads more than one token; put 'chunked' inside"):
        ChunkedConfig(inner=ExpertsConfig())
    ExpertsConfig(expert=ChunkedConfig())


WIDTHS = [(3, 5), (1, 1), (2, 4)]


def module(widths: tuple[int, int], bias: bool = True) -> SeparableConvolution:
    torch.manual_seed(0)
    config = SeparableConvolutionConfig(intermediate_size=7, widths=widths, bias=bias, activation="gelu")
    return config.build(3).double()


def by_equation(of: SeparableConvolution, x: Tensor, context: Context) -> Tensor:
    """y [B, T, E]: every token looks at every offset."""

    def counts(b: int, t: int, s: int) -> bool:
        inside = 0 <= s < x.shape[1]
        real = inside and (context.kv_valid is None or bool(context.kv_valid[b, s]))
        return real and (context.q_doc is None or bool(context.q_doc[b, s] == context.q_doc[b, t]))

    def depthwise_convolution(x: Tensor, taps: Tensor) -> Tensor:
        first = 1 - len(taps) if context.causal else -((len(taps) - 1) // 2)
        y = torch.zeros_like(x)
        for b in range(len(x)):
            for t in range(x.shape[1]):
                near = [o for o in range(len(taps)) if counts(b, t, t + first + o)]
                y[b, t] = sum((taps[o] * x[b, t + first + o] for o in near), torch.zeros(()))
        return y

    h = torch.nn.functional.gelu(of.up(depthwise_convolution(x, of.around)))
    return of.down(depthwise_convolution(h, of.around_inner))


def contexts(length: int, causal: bool) -> list[Context]:
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[0, :2], valid[1, -3:] = False, False
    doc = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 4, 4], [0, 1, 1, 1, 1, 1, 1, 1, 2]])[:, :length]
    return [
        Context(length, length, causal=causal, **options)
        for options in ({}, {"kv_valid": valid}, {"q_doc": doc, "kv_doc": doc})
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_convolutions_are_the_equation_gradients_too(widths: tuple[int, int], causal: bool):
    of, x = module(widths), torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    for context in contexts(9, causal):
        y, exact = of(x, context), by_equation(of, x, context)
        torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(y)
        grads, expected = (
            torch.autograd.grad((out * weights).sum(), [x, *of.parameters()]) for out in (y, exact)
        )
        torch.testing.assert_close(grads, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_any_split_of_a_convolved_text_is_one_pass(widths: tuple[int, int]):
    """Documents and padding too; a text longer than the state, and one shorter."""
    of, x = module(widths), torch.randn(2, 9, 3, dtype=torch.float64)
    for whole in contexts(9, causal=True):
        expected = of(x, whole)
        for split in ([1] * 9, [4, 1, 4], [8, 1], [1, 8]):
            state, outputs, start = of.new_state(), [], 0
            for size in split:
                end = start + size
                doc, valid = whole.kv_doc, whole.kv_valid
                context = Context(
                    size,
                    end,
                    causal=True,
                    q_doc=None if doc is None else doc[:, start:end],
                    kv_doc=None if doc is None else doc[:, :end],
                    kv_valid=None if valid is None else valid[:, :end],
                )
                y, state = of(x[:, start:end], context, state)
                outputs.append(y)
                start = end
            torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-12, atol=1e-12)


def test_a_document_after_a_text_without_numbers():
    of, x = module((3, 5)), torch.randn(1, 6, 3, dtype=torch.float64)
    _, state = of(x[:, :3], Context(3, 3, causal=True), of.new_state())
    doc = torch.tensor([[0, 0, 0, 0, 1, 1]])
    y, _ = of(x[:, 3:], Context(3, 6, causal=True, q_doc=doc[:, 3:], kv_doc=doc), state)
    whole = of(x, Context(6, 6, causal=True, q_doc=doc, kv_doc=doc))
    torch.testing.assert_close(y, whole[:, 3:], rtol=1e-12, atol=1e-12)


def test_convolutions_without_a_context_read_as_an_encoder():
    of, x = module((3, 5)), torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(of(x), of(x, Context(5, 5)))


def test_the_sizes_of_convolutions_are_the_authors():
    """A number for each channel and tap, and a matrix with a bias, twice."""
    assert SeparableConvolutionConfig().widths == (3, 5)
    sizes = {name: tuple(parameter.shape) for name, parameter in module((3, 5)).named_parameters()}
    assert sizes == {
        "around": (3, 3),
        "up.weight": (7, 3),
        "up.bias": (7,),
        "around_inner": (5, 7),
        "down.weight": (3, 7),
        "down.bias": (3,),
    }


@torch.no_grad()
def test_a_universal_transformer_with_convolutions_scores_beams_as_one_pass():
    torch.manual_seed(0)
    model = create_model("universal-transformer-tiny", feedforward="separable_convolution").double().eval()
    ids = torch.randint(3, 300, (2, 7))
    beams = model.generate(ids, max_new_tokens=6, num_beams=3, length_penalty=0.0, eos_token_id=None)
    target = beams.sequences
    log = model(ids, labels=target).logits.log_softmax(-1)
    scores = log.gather(-1, target.unsqueeze(-1)).sum((1, 2))
    torch.testing.assert_close(beams.scores, scores)


@pytest.mark.parametrize("training", [False, True])
def test_a_memory_goes_on_with_convolutions_in_training_as_in_evaluation(training: bool):
    stack = StackConfig(
        num_hidden_layers=2,
        feedforward=SeparableConvolutionConfig(intermediate_size=8),
        memory=RecurrentConfig(length=12),
        position=AlibiConfig(),
        dropout=0.0,
    )
    torch.manual_seed(0)
    of = Transformer(ModelConfig(vocab_size=11, hidden_size=24, decoder=stack)).double().train(training)
    ids = torch.arange(9).expand(1, -1)
    state, outputs = of.new_state(), []
    for part in ids.split(2, 1):
        output = of(part, state=state)
        state = output.state
        outputs.append(output.last_hidden_state)
    torch.testing.assert_close(torch.cat(outputs, 1), of(ids).last_hidden_state)


def test_keys_and_values_alone_are_not_all_that_is_kept():
    """As a learned prefix brings them, or a cache of transformers'."""
    cache = pytest.importorskip("transformers").DynamicCache()
    borrowed = pytest.importorskip("polyformer.models.transformers.cache").BorrowedCache
    vectors = torch.zeros(1, 4, 3, 32)
    for feedforward in ("dense", "separable_convolution"):
        model = create_model("decoder-tiny", feedforward=feedforward)
        assert model.decoder is not None
        if not cache.layers:
            for layer in range(len(model.decoder.sequence)):
                cache.update(vectors, vectors, layer)
            assert borrowed(cache, model, {}).state.tokens.length == 3
    with pytest.raises(InputError, match="past_key_values: the state of this model has more"):
        borrowed(cache, model, {})


def test_convolutions_that_cannot_be_are_refused():
    with pytest.raises(InputError, match=r"widths\[1\]: expected 1 or more"):
        SeparableConvolutionConfig(widths=(3, 0))
    with pytest.raises(InputError, match="inner: 'separable_convolution' reads more than one token"):
        ChunkedConfig(inner=SeparableConvolutionConfig())
    with pytest.raises(InputError, match="expert: 'separable_convolution' reads more than one token"):
        ExpertsConfig(expert=SeparableConvolutionConfig())
    options = {"block": ReversibleConfig(), "memory": RecurrentConfig()}
    StackConfig(feedforward=DenseConfig(), **options)
    with pytest.raises(InputError, match="feedforward: 'separable_convolution' has a state"):
        StackConfig(feedforward=SeparableConvolutionConfig(), **options)
