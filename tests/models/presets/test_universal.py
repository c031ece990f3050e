"""The Universal Transformer against its recurrence, and its size."""

import torch
from torch import Tensor

from polyformer import create_model
from polyformer.attention.positions.base import sinusoids
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.layer import Layer


def recurrence(model: Transformer, ids: Tensor, steps: int) -> Tensor:
    """h^t = LN(A^t + Transition(A^t)), A^t = LN(h' + Attention(h')), h' = h^(t-1) + P^t."""
    assert model.encoder is not None
    (layer,) = model.encoder.layers
    assert isinstance(layer, Layer)
    first, second = layer.block.norms
    length, width = ids.shape[1], model.config.hidden_size
    h, context = model.get_parameter("tokens.weight")[ids] * width**0.5, Context(length, length)
    for step in range(steps):
        p = sinusoids(torch.arange(length), width, 10000.0) + sinusoids(torch.tensor(step), width, 10000.0)
        moved = h + p
        a = first(moved + layer.attention(moved, context, model.encoder.position)[0])
        h = second(a + layer.feedforward(a, context))
    return h


def test_the_encoder_is_the_recurrence_for_any_number_of_steps():
    torch.manual_seed(0)
    ids = torch.randint(3, 300, (2, 7))
    weights = None
    for steps in (1, 3, 5):
        model = create_model("universal-transformer-tiny", num_hidden_layers=steps).double().eval()
        if weights is not None:
            model.load_state_dict(weights)  # of the same layer, whatever the number of steps
        weights = model.state_dict()
        hidden = model.encode(ids).source
        assert hidden is not None
        torch.testing.assert_close(hidden, recurrence(model, ids, steps), rtol=1e-12, atol=1e-12)


def test_the_base_model_has_as_many_parameters_as_the_transformers():
    with torch.device("meta"):
        models = [create_model(name) for name in ("universal-transformer-base", "transformer-base")]
    ours, transformer = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert abs(ours / transformer - 1) < 0.1
