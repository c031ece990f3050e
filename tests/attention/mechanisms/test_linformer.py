"""Linformer: the paper's equation written out, what it shares, padding, lengths, and the public package."""

import math

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import LinformerConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.mechanisms.length_projections import (
    ConvolutionProjection,
    LinearProjection,
)
from polyformer.attention.mechanisms.linformer import SHARING, Linformer
from polyformer.attention.positions import LearnedConfig
from polyformer.core.errors import InputError
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context, positions_from_mask
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig


def inputs(length: int, heads: int = 3, key_heads: int | None = None) -> list[Tensor]:
    """q, k, v of 2 rows."""
    torch.manual_seed(0)
    return [
        torch.randn(2, count, length, 4, dtype=torch.float64, requires_grad=True)
        for count in (heads, key_heads or heads, key_heads or heads)
    ]


def build(heads: int = 3, **options) -> Linformer:
    torch.manual_seed(1)
    return LinformerConfig(**options).build(heads, 4).double().eval()


def run(mechanism: Linformer, tensors: list[Tensor], context: Context | None = None) -> Tensor:
    return mechanism(*tensors, context or Context(tensors[0].shape[2], tensors[1].shape[2]), None, None)[0]


def matrices(parts: torch.nn.ModuleList, heads: int) -> list[Tensor]:
    """E or F of every head."""
    weight = parts[0].weight
    assert isinstance(weight, Tensor)
    return [weight[head % len(weight)] for head in range(heads)]


@pytest.mark.parametrize("length", [13, 9])
@pytest.mark.parametrize("sharing", SHARING)
def test_it_is_the_equation(sharing: str, length: int):
    """Equation 7 head by head, for inputs of n tokens and of fewer, with every gradient."""
    mechanism, tensors = build(max_length=13, k=5, sharing=sharing), inputs(length)
    parameters = list(mechanism.parameters())
    heads = []
    for h, (e, f) in enumerate(zip(matrices(mechanism.keys, 3), matrices(mechanism.values, 3))):
        q, k, v = (tensor[:, h] for tensor in tensors)
        scores = q @ (e[:, :length] @ k).mT / math.sqrt(4)
        heads.append(torch.softmax(scores, -1) @ (f[:, :length] @ v))
    expected, actual = torch.stack(heads, 1), run(mechanism, tensors)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(expected)
    slopes = [torch.autograd.grad((y * weight).sum(), [*tensors, *parameters]) for y in (actual, expected)]
    for slope, expected_slope in zip(*slopes):
        torch.testing.assert_close(slope, expected_slope, rtol=1e-10, atol=1e-12)


def whole(tensors: list[Tensor], context: Context) -> Tensor:
    return SoftmaxConfig().build(3, 4)(*tensors, context, None, None)[0]


@pytest.mark.parametrize("sharing", SHARING)
def test_with_identities_it_is_full_attention(sharing: str):
    tensors, context = inputs(11), Context(11, 11)
    mechanism = build(max_length=11, k=11, sharing=sharing)
    for part in [*mechanism.keys, *mechanism.values]:
        assert isinstance(part, LinearProjection)
        part.weight.data = torch.eye(11, dtype=torch.float64).expand_as(part.weight).clone()
    torch.testing.assert_close(run(mechanism, tensors), whole(tensors, context), rtol=1e-10, atol=1e-12)


def padded_context() -> Context:
    """One row padded on the left, one on the right."""
    valid = torch.ones(2, 11, dtype=torch.bool)
    valid[0, :3] = valid[1, 7:] = False
    positions = positions_from_mask(valid)
    return Context(11, 11, q_pos=positions, kv_pos=positions, kv_valid=valid)


@pytest.mark.parametrize("projection", ["convolution", "mean", "max"])
def test_windows_of_one_position_are_full_attention(projection: str):
    """With k = n at any length: a window without a token takes no part in the softmax."""
    tensors, mechanism = inputs(11), build(max_length=20, k=20, projection=projection)
    for part in [*mechanism.keys, *mechanism.values]:
        if isinstance(part, ConvolutionProjection):
            part.weight.data = torch.eye(4, dtype=torch.float64).expand_as(part.weight).clone()
    for context in (Context(11, 11), padded_context()):
        expected = whole(tensors, context)
        torch.testing.assert_close(run(mechanism, tensors, context), expected, rtol=1e-10, atol=1e-12)


def test_pools_by_hand():
    """Windows of 3: 1, 2 and padding have the mean 1.5 and the maximum 2; a window of padding is not seen."""
    x = torch.tensor([1.0, 2.0, 99.0, -4.0, -8.0, -9.0, 7.0, 7.0], dtype=torch.float64).view(1, 1, 8, 1)
    valid = torch.tensor([[True, True, False, True, True, True, False, False]])
    context, zeros = Context(8, 8, kv_valid=valid), torch.zeros_like(x)
    for projection, expected in (("mean", (1.5 - 7.0) / 2), ("max", (2.0 - 4.0) / 2)):
        mechanism = LinformerConfig(max_length=9, k=3, projection=projection).build(1, 1).double()
        y, _ = mechanism(zeros, zeros, x, context, None, None)  # without scores: the mean of what is seen
        torch.testing.assert_close(y, torch.full_like(y, expected))


def test_a_token_has_the_column_of_its_position():
    """Left padding moves slots, not columns."""
    mechanism, tensors = build(max_length=30, k=5), inputs(11)
    y = run(mechanism, tensors, padded_context())
    left = run(mechanism, [tensor[:1, :, 3:] for tensor in tensors])
    right = run(mechanism, [tensor[1:, :, :7] for tensor in tensors])
    torch.testing.assert_close(y[:1, :, 3:], left, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y[1:, :, :7], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("projection", ["linear", "mean", "max", "convolution"])
def test_masks_are_not_silently_ignored(projection: str):
    """A fault of public code: what the mask hides changes nothing, and the mask itself does."""
    mechanism, tensors = build(max_length=12, k=4, projection=projection), inputs(11)
    context = padded_context()
    y = run(mechanism, tensors, context)
    hidden = ~context.kv_valid[:, None, :, None]  # type: ignore[index]
    changed = [tensors[0], *(tensor.masked_fill(hidden, 1e6) for tensor in tensors[1:])]
    torch.testing.assert_close(run(mechanism, changed, context), y, rtol=0, atol=0)
    assert (run(mechanism, tensors) - y).abs().max() > 1e-2


def encoder(mechanism: MechanismConfig, layers: int = 2, heads: int = 2) -> ModelConfig:
    attention = AttentionConfig(num_attention_heads=heads, mechanism=mechanism)
    stack = StackConfig(num_hidden_layers=layers, position=LearnedConfig(), attention=attention)
    return ModelConfig(vocab_size=11, hidden_size=24, encoder=stack)


def test_shared_projections_leave_keys_and_values_their_own():
    """A fault of public code, whose `share_kv` makes W_V the same as W_K: here only E and F are one."""
    model = Transformer(encoder(LinformerConfig(max_length=8, k=4, sharing="key-value")))
    names = [name for name, _ in model.named_parameters() if "layers.0.attention" in name]
    assert {f"encoder.layers.0.attention.{kind}.weight" for kind in ("key", "value")} <= set(names)
    attention = model.get_submodule("encoder.layers.0.attention")
    mechanism = attention.mechanism
    assert isinstance(mechanism, Linformer)
    assert mechanism.keys[0].weight is mechanism.values[0].weight
    assert attention.key.weight is not attention.value.weight  # type: ignore[union-attr]
    tensors = inputs(8)
    tensors[1] = tensors[2].detach() + 1
    mechanism = build(max_length=8, k=4, sharing="key-value")
    with_same = run(mechanism, [tensors[0], tensors[2], tensors[2]])
    assert (run(mechanism, tensors) - with_same).abs().max() > 1e-3


def projections(model: Transformer, name: str = "mechanism") -> int:
    """Different matrices of the model: those of heads lie in one tensor."""
    own = {id(parameter): len(parameter) for key, parameter in model.named_parameters() if name in key}
    return sum(own.values())


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("head", 24), ("key-value", 12), ("layer", 1)])
@pytest.mark.parametrize("projection", ["linear", "convolution"])
def test_twelve_layers_of_twelve_heads_share_as_in_the_paper(sharing: str, count: int, projection: str):
    """Section 4: head-wise, key-value and layer-wise sharing come to 24, 12 and 1 matrices."""
    config = LinformerConfig(max_length=64, k=16, sharing=sharing, projection=projection)
    with torch.device("meta"):
        model = Transformer(encoder(config, layers=12, heads=12))
    assert projections(model) == count
    shape = (16, 64) if projection == "linear" else (4, 2, 2)
    assert all(
        parameter.shape[1:] == shape for key, parameter in model.named_parameters() if "mechanism" in key
    )


@pytest.mark.parametrize("projection", ["mean", "max"])
def test_pools_have_no_parameters(projection: str):
    model = Transformer(encoder(LinformerConfig(max_length=8, k=4, projection=projection)))
    assert projections(model) == 0


def test_what_layers_share_is_shared_after_loading(tmp_path):
    torch.manual_seed(0)
    model = Transformer(encoder(LinformerConfig(max_length=8, k=4, sharing="layer"), layers=3))
    model.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert projections(loaded) == 1
    assert len(list(loaded.parameters())) == len(list(model.parameters()))
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
    ids = torch.arange(6).view(1, 6)
    loaded.train()(ids, labels=ids).loss.backward()
    optimizer.step()
    shared = [weight for name, weight in loaded.state_dict().items() if "mechanism" in name]
    assert len(shared) == 6
    assert all(torch.equal(weight, shared[0]) for weight in shared)
    assert not torch.equal(
        shared[0], model.state_dict()["encoder.layers.0.attention.mechanism.keys.0.weight"]
    )


def test_k_by_layer_begins_again():
    config = LinformerConfig(max_length=16, k=(8, 4), sharing="key-value")
    model = Transformer(encoder(config, layers=3))
    weights = [weight for name, weight in model.named_parameters() if "mechanism" in name]
    assert [tuple(weight.shape) for weight in weights] == [(1, 8, 16), (1, 4, 16), (1, 8, 16)]


@pytest.mark.parametrize(
    ("projection", "sharing"),
    [  # "linear" and "convolution" refuse one projection for heads of several k
        *((projection, "none") for projection in ("linear", "mean", "max", "convolution")),
        *((projection, "head") for projection in ("mean", "max")),
    ],
)
def test_k_by_head(projection: str, sharing: str):
    """Heads of 4, 8, 4 and 8 rows: each as a mechanism of its k gives it, in the order of the heads."""
    mechanism = build(4, max_length=16, k=((4, 8),), projection=projection, sharing=sharing)
    tensors, context = inputs(11, 4), padded_context()
    y = run(mechanism, tensors, context)
    for index, (k, heads) in enumerate({4: [0, 2], 8: [1, 3]}.items()):
        single = build(2, max_length=16, k=k, projection=projection, sharing="none")
        single.keys[0].load_state_dict(mechanism.keys[index].state_dict())
        single.values[0].load_state_dict(mechanism.values[index].state_dict())
        expected = run(single, [x[:, heads] for x in tensors], context)
        torch.testing.assert_close(y[:, heads], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [8, ((4, 8),)])
def test_weights_can_be_looked_at(k):
    """One record a call, a row a query and a column a row of E; heads of fewer rows have zeros beyond."""
    mechanism, tensors = build(4, max_length=16, k=k, sharing="none"), inputs(11, 4)
    with recorded() as records:
        y = run(mechanism, tensors)
    assert [record.shape for record in records] == [(2, 4, 11, 8)]
    torch.testing.assert_close(records[0].sum(-1), torch.ones(2, 4, 11, dtype=torch.float64))
    torch.testing.assert_close(y, run(mechanism, tensors), rtol=1e-10, atol=1e-12)
    assert (records[0][:, 0, :, 4:].abs().max() == 0) == (k != 8)


@pytest.mark.parametrize("sharing", ["none", "head"])
def test_grouped_keys(sharing: str):
    """Query heads that share keys and values, with an E of their own or one for all."""
    mechanism, (q, k, v) = build(4, max_length=12, k=5, sharing=sharing), inputs(11, 4, 2)
    repeated = [tensor.repeat_interleave(2, dim=1) for tensor in (k, v)]
    expected = run(mechanism, [q, *repeated])
    torch.testing.assert_close(run(mechanism, [q, k, v]), expected, rtol=1e-10, atol=1e-12)


def test_dropout_is_of_weights_in_training():
    mechanism, tensors = build(max_length=12, k=5, dropout=0.5), inputs(11)
    still = run(mechanism, tensors)
    torch.testing.assert_close(run(mechanism, tensors), still, rtol=0, atol=0)
    mechanism.train()
    assert (run(mechanism, tensors) - run(mechanism, tensors)).abs().max() > 1e-3


def test_it_is_the_public_package():
    """`linformer` on the same weights, at its length and at a shorter one."""
    theirs = pytest.importorskip("linformer").LinformerSelfAttention
    torch.manual_seed(0)
    layer = theirs(24, seq_len=16, k=6, heads=3).double()
    mechanism = LinformerConfig(max_length=16, k=6).build(3, 8).double()
    mechanism.keys[0].weight.data = layer.proj_k.data.T.unsqueeze(0)
    mechanism.values[0].weight.data = layer.proj_v.data.T.unsqueeze(0)
    for length in (16, 11):
        x = torch.randn(2, length, 24, dtype=torch.float64)
        q, k, v = (to(x).unflatten(2, (3, 8)).transpose(1, 2) for to in (layer.to_q, layer.to_k, layer.to_v))
        y = run(mechanism, [q, k, v])
        result = layer.to_out(y.transpose(1, 2).flatten(2))
        torch.testing.assert_close(result, layer(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("projection", ["linear", "mean", "max", "convolution"])
def test_a_padded_call_is_one_graph(projection: str):
    mechanism, tensors, context = (
        build(max_length=12, k=4, projection=projection),
        inputs(11),
        padded_context(),
    )
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: run(mechanism, [q, k, v], context), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(*tensors), run(mechanism, tensors, context), rtol=1e-10, atol=1e-12)


def test_tokens_beyond_the_last_column_are_refused():
    mechanism, why = (
        build(max_length=8, k=4),
        "position 8 is beyond the max_length 8 .*; shorten the input, or build",
    )
    with pytest.raises(InputError, match=why):
        run(mechanism, inputs(9))
    valid = torch.ones(2, 9, dtype=torch.bool)
    with pytest.raises(InputError, match=why):
        run(mechanism, inputs(9), Context(9, 9, kv_valid=valid))
    valid[0, 0] = valid[1, 8] = False  # 8 real tokens in each row
    positions = positions_from_mask(valid)
    run(mechanism, inputs(9), Context(9, 9, kv_pos=positions, q_pos=positions, kv_valid=valid))
    with pytest.raises(InputError, match=why):
        run(mechanism, inputs(9), Context(9, 9, kv_pos=positions + 1, q_pos=positions, kv_valid=valid))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharing": "heads"}, "unknown sharing 'heads': did you mean 'head'"),
        ({"projection": "min"}, "unknown projection 'min'"),
        ({"max_length": 0}, "max_length: expected 1 or more, got 0"),
        ({"max_length": 8, "k": 9}, "k: expected 1 to max_length 8 rows, got 9"),
        ({"max_length": 8, "k": (4, 0)}, "k: expected 1 to max_length 8 rows, got 0"),
        ({"k": ()}, r"k: expected a number for each layer or head, got \(\)"),
        ({"k": ((),)}, "k: expected a number for each layer or head"),
        ({"max_length": 8, "k": 3, "projection": "mean"}, "k: 'mean' takes windows .* divisor of 8, got 3"),
        ({"max_length": 8, "k": 3, "projection": "max"}, "k: 'max' takes windows"),
        ({"max_length": 8, "k": 3, "projection": "convolution"}, "k: 'convolution' takes windows"),
        ({"k": ((4, 8),)}, "k: heads that share a projection have one k, .* use sharing 'none'"),
        (
            {"max_length": 16, "k": ((4, 8),), "projection": "convolution"},
            "k: heads that share a projection have one k, .* use sharing 'none'",
        ),
        ({"k": (4, 8), "sharing": "layer"}, "k: layers that share a projection have one k"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, message: str):
    with pytest.raises(InputError, match=message):
        LinformerConfig(**options)


def test_it_is_no_decoder():
    stack = StackConfig(attention=AttentionConfig(mechanism=LinformerConfig()))
    with pytest.raises(
        InputError, match="'linformer' cannot run in a decoder: it sees later tokens; use 'softmax' with"
    ):
        ModelConfig(vocab_size=11, decoder=stack)
