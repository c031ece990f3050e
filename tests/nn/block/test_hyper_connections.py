"""Hyper-connections: the equation token by token, the start as pre-norm, decoding, and what is refused."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer import InputError, create_model, trace
from polyformer.applications.interventions import replacements, token_effects
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.nn.block import HyperConnectionsConfig
from polyformer.nn.heads import EnhancedMaskedConfig
from polyformer.nn.stack.feature_stack import HyperStack
from polyformer.training.distributed.fully_sharded import why_not_per_layer

BLOCKS = [HyperConnectionsConfig(streams=n, dynamic=dynamic) for n in (1, 3) for dynamic in (False, True)]
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 11}


def decoder(block: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 3, "dropout": 0.0, "position": "rope"}
    return create_model("decoder-small", block=block, **{**sizes, **options}).double().eval()


def moved(module: Any) -> Any:
    """The module with connections away from their initial values."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "connections" in name:
                parameter += 0.4 * torch.randn_like(parameter)
    return module


def equation(block: Any, x: Tensor, functions: list[Any]) -> Tensor:
    """The streams after each sub-layer, one token and one weight at a time."""
    n, batch, length, _ = x.shape
    for norm, own, f in zip(block.norms, block.connections, functions):
        tokens = {}
        for b in range(batch):
            for t in range(length):
                streams = [x[m, b, t] for m in range(n)]
                a_m, a_r = [*own.reads], [[own.mixes[m * n + i] for i in range(n)] for m in range(n)]
                b_i = [*own.writes]
                if hasattr(own, "weight"):
                    for m, normed in enumerate(map(own.norm, streams)):
                        a_m[m] = a_m[m] + own.alpha_scale[0] * torch.tanh(normed @ own.weight[0])
                        for i in range(n):
                            change = torch.tanh(normed @ own.weight[1 + i])
                            a_r[m][i] = a_r[m][i] + own.alpha_scale[0] * change
                        b_i[m] = b_i[m] + own.beta_scale[0] * torch.tanh(normed @ own.weight[n + 1])
                h = sum(a_m[m] * streams[m] for m in range(n))
                y = f(norm(h))
                for i in range(n):
                    tokens[i, b, t] = b_i[i] * y + sum(a_r[m][i] * streams[m] for m in range(n))
        x = torch.stack([tokens[key] for key in sorted(tokens)]).view_as(x)
    return x


@pytest.mark.parametrize("config", BLOCKS, ids=str)
def test_streams_follow_the_equation_with_its_gradients(config: HyperConnectionsConfig):
    torch.manual_seed(0)
    block: Any = config.build(5, 3, LayerNormConfig(), 0.0).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(config.streams, 2, 3, 5, dtype=torch.float64, requires_grad=True)
    functions = [torch.cos, torch.square, lambda x: 2 - x.flip(-1)]
    expected, y = equation(block, x, functions), block(x, functions)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    weights = [x, *block.parameters()]
    ours, theirs = (torch.autograd.grad(out.sin().sum(), weights) for out in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    if config.streams > 1:  # a norm after the only stream makes its A_m a factor of no effect
        assert all(gradient.abs().max() > 1e-6 for gradient in ours)


def test_initial_weights_are_the_papers():
    """Each layer goes on counting sub-layers, and building a model draws none of these weights anew."""
    layers = decoder("hyper_connections(streams=4)").decoder.layers
    connections = [own for layer in layers for own in layer.block.connections]
    for number, own in enumerate(connections):
        assert torch.equal(own.reads, F.one_hot(torch.tensor(number % 4), 4).double())
        assert torch.equal(own.mixes.view(4, 4), torch.eye(4).double())
        assert torch.equal(own.writes, torch.ones(4).double())
        assert not own.weight.any()
        torch.testing.assert_close([own.alpha_scale.item(), own.beta_scale.item()], [0.01, 0.01])
    assert len(connections) == 6


@pytest.mark.parametrize("position", ["rope", "learned_per_layer"])
@pytest.mark.parametrize("config", BLOCKS, ids=str)
def test_a_new_model_is_the_pre_norm_model(config: HyperConnectionsConfig, position: str):
    """Every layer's input is n times as large, as the sum of n equal streams."""
    model = decoder(config, position=position)
    plain = decoder("pre", position=position)
    shared = {name: weight for name, weight in model.state_dict().items() if "connections" not in name}
    plain.load_state_dict(shared)
    ids = torch.randint(11, (2, 7))
    ours, theirs = (each(ids, output_hidden_states=True).hidden_states for each in (model, plain))
    assert len(ours) == len(theirs) == 4
    for y, expected in zip(ours[:-1], theirs[:-1]):
        torch.testing.assert_close(y, config.streams * expected, rtol=1e-12, atol=1e-12)
    plain.decoder.final_norm.eps /= config.streams**2  # as the variance of the sum is n^2 times as large
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("config", BLOCKS, ids=str)
def test_decoding_token_by_token_equals_the_whole(config: HyperConnectionsConfig):
    model = moved(decoder(config))
    ids, state, parts = torch.randint(11, (2, 7)), None, []
    for token in ids.split(1, 1):
        out = model(token, state=state, use_cache=True)
        state = out.state
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-11, atol=1e-11)


def gradients(model: Any, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    loss = model.train()(ids, labels=ids).loss
    return list(torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True))


def test_recomputed_activations_give_equal_gradients():
    model, ids = moved(decoder(BLOCKS[-1], dropout=0.1)), torch.randint(11, (2, 7))
    stored = gradients(model, ids)
    model.decoder.recompute = True
    torch.testing.assert_close(gradients(model, ids), stored, rtol=0, atol=0)


def test_a_skipped_layer_leaves_all_streams():
    """Each pass of training is one of the models with fewer layers, and in evaluation all layers run."""
    model, ids = moved(decoder(BLOCKS[-1], layerdrop=0.5)), torch.randint(11, (2, 7))
    whole = model(ids).logits
    expected = []
    for kept in ([], [0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        layers, groups = model.decoder.layers, model.decoder.groups
        model.decoder.groups, model.decoder.layer_range = kept, range(len(kept))
        expected.append(model(ids).logits)
        model.decoder.groups, model.decoder.layer_range = groups, range(len(layers))
    torch.testing.assert_close(expected[-1], whole, rtol=0, atol=0)
    chosen = set()
    model.decoder.training = True  # the dropout of its parts stays off
    with torch.no_grad():
        for _ in range(60):
            y = model(ids).logits
            errors = [(y - each).abs().max() for each in expected]
            chosen.add(min(range(8), key=errors.__getitem__))
            assert min(errors) < 1e-12
    assert len(chosen) > 4


def test_the_first_layers_values_are_of_its_streams():
    """The value residual reads the input of the first attention, h."""
    model, ids = moved(decoder(BLOCKS[-1], value_residual=True)), torch.randint(11, (2, 7))
    first = model.decoder.sequence[0]
    streams = model.decoder.split(model(ids, output_hidden_states=True).hidden_states[0] / 3)
    values: list[Tensor] = []
    handle = first.attention.value.register_forward_hook(lambda _, inputs, y: values.append(y))
    model(ids)
    handle.remove()
    expected = first.attention.value(first.block.norms[0](first.block.connections[0](streams)[0]))
    assert values
    for each in values:
        torch.testing.assert_close(each, expected, rtol=1e-11, atol=1e-11)


def test_streams_keep_their_precision_under_autocast():
    """The residual stream itself is not rounded: without sub-layers it passes a layer unchanged."""
    block = HyperConnectionsConfig(streams=3).build(8, 2, LayerNormConfig(), 0.0)
    x = torch.randn(3, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x, [torch.zeros_like, lambda x: torch.zeros_like(x.bfloat16())])
    assert torch.equal(y, x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "recurrent", "position": "transformer_xl"}, "memory: 'recurrent' keeps the residual"),
        ({"memory": "memorizing"}, "memory: 'memorizing' keeps the residual stream of each layer"),
        ({"depth": "act"}, "depth: 'act' lets tokens skip layers, but block as configured"),
        ({"norm": "batch"}, "norm: 'batch' computes statistics over all tokens"),
        ({"convolution": {}}, "convolution: expected the block 'post'"),
        ({"block": "hyper_connections(streams=0)"}, "streams: expected 1 or more, got 0"),
    ],
    ids=["recurrent", "memorizing", "depth", "norm", "convolution", "streams"],
)
def test_parts_that_read_one_stream_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        decoder(**{"block": "hyper_connections", **options})


def test_a_head_that_runs_the_last_layer_again_is_refused():
    options = {**SIZES, "head": EnhancedMaskedConfig(), "num_hidden_layers": 2}
    with pytest.raises(InputError, match=r"encoder.block: head '\w+' runs the last layer again.*use 'pre'"):
        create_model("encoder-tiny", block="hyper_connections", **options)


def test_static_weights_allow_a_norm_over_all_tokens():
    assert decoder("hyper_connections(dynamic=false)", norm="batch")(torch.zeros(1, 3).long()).logits.any()


def test_layers_are_gathered_one_by_one_and_sinks_are_allowed():
    model = decoder("hyper_connections", memory="sinks(first=1, length=3)")
    assert type(model.decoder) is HyperStack
    assert why_not_per_layer(model, model.decoder) is None


def test_interventions_change_outputs_and_no_stream():
    """Effects of heads are of whole passes, as no single stream between layers can be kept."""
    model, ids = moved(decoder(BLOCKS[-1])), torch.randint(11, (2, 7))
    with trace(model) as calls:
        with pytest.raises(
            InputError, match="residual: layer 0 of the decoder has no single residual stream"
        ):
            _ = calls.layer(0).residual
        calls.layer(1).output.set(0)
        changed = model(ids).logits
    assert not torch.equal(changed, model(ids).logits)
    losses, rises = token_effects(model, ids, replacements(model, [ids], by="zero"))
    with trace(model) as calls:
        calls.layer(1).head(0).output.set(0)
        without = F.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    torch.testing.assert_close(rises[1, 0], without - losses, rtol=1e-6, atol=1e-6)
