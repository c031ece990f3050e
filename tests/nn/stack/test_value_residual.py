"""The value residual: its equation, through every way of running a layer, and what is refused."""

from typing import Any

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.training.distributed.fully_sharded import why_not_per_layer
from polyformer.training.distributed.pipeline_stages import check_pipelined
from polyformer.training.distributed.tensor_parallel import check_tensor_parallel

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 11}


def decoder(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 3, "value_residual": True, "position": "none", "dropout": 0.0}
    return create_model("decoder-small", **{**sizes, **options}).double()


def test_values_are_learned_sums_with_the_first_layers_values():
    model = decoder()
    layers = model.decoder.sequence
    assert layers[0].attention.value_shares is None
    for number, layer in enumerate(layers[1:]):
        torch.testing.assert_close(layer.attention.value_shares, torch.full((2,), 0.5).double())
        with torch.no_grad():
            layer.attention.value_shares.copy_(torch.tensor([0.25 + number, -1.5]))
    ids = torch.randint(11, (2, 7))
    inputs = model(ids, output_hidden_states=True).hidden_states
    first = layers[0].attention.value(layers[0].block.pre_norm(inputs[0]))
    hidden = 0
    for number, layer in enumerate(layers):
        attention, x = layer.attention, layer.block.pre_norm(inputs[number])
        q, k, v = (
            part(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for part in (attention.query, attention.key, attention.value)
        )
        if number:
            own, of_first = attention.value_shares
            v = own * v + of_first * first.unflatten(-1, (2, 4)).transpose(1, 2)
        weights = (q @ k.mT / 2 + torch.full((7, 7), -torch.inf).triu(1)).softmax(-1)
        y = attention.output((weights @ v).transpose(1, 2).flatten(2))
        sublayers = [lambda x, y=y: y, lambda x, layer=layer: layer.feedforward(x)]
        hidden = layer.block(inputs[number], sublayers)
    torch.testing.assert_close(model.decoder.final_norm(hidden), inputs[-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"depth": "act"}, {"attention": "lsh(buckets=2, window=4)"}])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_first_layers_values_get_gradients_from_all_layers(options: dict[str, Any], recompute: bool):
    model, ids = decoder(**options), torch.randint(11, (2, 7))
    model.decoder.recompute = recompute and "depth" not in options
    weight = model.decoder.sequence[0].attention.value.weight
    step = 1e-6 * torch.randn_like(weight)

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        return model(ids, labels=ids).loss

    loss().backward()
    derivative = (weight.grad * step).sum()
    with torch.no_grad():
        weight += step
        after = loss()
        weight -= 2 * step
        before = loss()
    torch.testing.assert_close((after - before) / 2, derivative, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"num_hidden_groups": 1},
        {"block": "reversible"},
        {"memory": "recurrent(length=4)", "position": "rope"},
    ],
    ids=["groups", "block", "memory"],
)
def test_layers_that_run_without_the_first_are_refused(options: dict[str, Any]):
    with pytest.raises(InputError, match=f"value_residual: expected false with {next(iter(options))}"):
        decoder(**options)


def test_models_that_are_divided():
    model = decoder()
    assert why_not_per_layer(model, model.decoder) == "all layers read the first layer's values"
    with pytest.raises(InputError, match="pipeline: the value_residual needs all layers in one process"):
        check_pipelined(model)
    with pytest.raises(InputError, match="value_residual is not divided by heads"):
        check_tensor_parallel(model, 2)
