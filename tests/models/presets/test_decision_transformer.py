"""Decision Transformers by name: the paper's sizes, counted beside transformers'."""

import pytest
import torch

from polyformer.models.presets import create_model, model_config

transformers = pytest.importorskip("transformers")

SIZES = {
    "dt-gym": {},
    "dt-atari": {
        "n_layer": 6,
        "n_head": 8,
        "activation_function": "gelu",
        "act_dim": 18,
        "action_tanh": False,
    },
}


@pytest.mark.parametrize(
    ("name", "layers", "heads", "activation"), [("dt-gym", 3, 1, "relu"), ("dt-atari", 6, 8, "gelu")]
)
def test_sizes_are_the_papers_and_parameters_as_many_as_theirs(
    name: str, layers: int, heads: int, activation: str
):
    """Theirs have a table of tokens and one of positions besides, which read nothing but place 0."""
    config = model_config(name)
    stack = config.decoder
    assert stack is not None
    assert (config.hidden_size, stack.num_hidden_layers, stack.dropout) == (128, layers, 0.1)
    assert stack.attention.num_attention_heads == heads
    assert stack.feedforward.override("activation", activation) == stack.feedforward
    with torch.device("meta"):
        ours = create_model(name)
        theirs = transformers.DecisionTransformerModel(transformers.DecisionTransformerConfig(**SIZES[name]))
    tables = {"encoder.wte.weight", "encoder.wpe.weight"}
    counted = sum(parameter.numel() for key, parameter in theirs.named_parameters() if key not in tables)
    assert sum(parameter.numel() for parameter in ours.parameters()) == counted
