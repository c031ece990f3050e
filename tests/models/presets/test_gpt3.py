"""GPT-3 by name: the sizes of the paper's table 2.1; layers attend in turn to all tokens and to a window."""

import pytest
import torch

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.models.architectures import Transformer
from polyformer.models.presets import create_model, model_config


@pytest.mark.parametrize(
    ("name", "table", "layers", "width", "heads", "head"),
    [
        ("gpt3-125m", 125e6, 12, 768, 12, 64),
        ("gpt3-6.7b", 6.7e9, 32, 4096, 32, 128),
        ("gpt3-175b", 175.0e9, 96, 12288, 96, 128),
    ],
)
def test_sizes_of_the_table(name: str, table: float, layers: int, width: int, heads: int, head: int):
    config = model_config(name)
    stack = config.decoder
    assert stack is not None
    assert (stack.num_hidden_layers, config.hidden_size, stack.attention.num_attention_heads) == (
        layers,
        width,
        heads,
    )
    assert (stack.attention.width(width), config.max_position_embeddings) == (head, 2048)
    with torch.device("meta"):
        model = Transformer(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    plain = 50257 * width + 2048 * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert count == plain
    assert abs(count / table - 1) < 0.01


def test_every_other_layer_has_a_window():
    stack = model_config("gpt3-125m").decoder
    assert stack is not None
    mechanism = stack.attention.mechanism
    assert isinstance(mechanism, SoftmaxConfig)
    windowed = [isinstance(mechanism.for_layer(layer).pattern, Window) for layer in range(12)]
    assert windowed == [False, True] * 6


def test_a_windowed_layer_attends_to_its_window_alone():
    sizes = {"num_hidden_layers": 2, "hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 20}
    model = create_model("gpt3-125m", **sizes, vocab_size=23, max_position_embeddings=300).eval()
    ids = torch.randint(23, (1, 300))
    full, window = model(ids, output_attentions=True).attentions
    assert (full[0, :, 299] > 0).all()
    assert (window[0, :, 299, :44] == 0).all()
    assert (window[0, :, 299, 44:] > 0).all()
