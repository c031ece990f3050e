"""Models by name: what is listed, what an override reaches, what is refused."""

from typing import Any

import pytest
import torch

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Global, Window
from polyformer.attention.positions import SinusoidalConfig
from polyformer.core.errors import InputError
from polyformer.models.presets import MODELS, create_model, list_models, model_config, register
from polyformer.models.presets.base import SizedPreset, Variant
from polyformer.nn.block import PreNormConfig


def test_they_are_listed_with_wildcards():
    assert {"gpt2", "bert-base", "transformer-base", "transformer-big"} <= set(list_models())
    assert list_models("transformer-b*") == ["transformer-base", "transformer-big"]
    assert list_models("nothing*") == []


def test_every_preset_can_be_made_and_cites_its_source():
    wrong = []
    for name in MODELS:
        with torch.device("meta"):
            model = create_model(name)
        cites = (MODELS[name].__doc__ or "").strip().endswith(".")
        if model.config != MODELS[name]() or not cites:
            wrong.append(name)
    assert not wrong


def test_a_bare_name_is_set_on_both_sides_a_path_on_one():
    config = model_config("transformer-base", {"num_hidden_layers": 2, "decoder.num_hidden_layers": 3})
    assert config.encoder is not None
    assert config.decoder is not None
    assert (config.encoder.num_hidden_layers, config.decoder.num_hidden_layers) == (2, 3)


def test_parts_are_set_by_kind():
    config = model_config(
        "gpt2", {"block": "parallel", "norm": "rms", "position": {"kind": "sinusoidal", "base": 50}}
    )
    assert config.decoder is not None
    assert (config.decoder.block.kind, config.decoder.norm.kind) == ("parallel", "rms")
    assert config.decoder.position == SinusoidalConfig(base=50.0)
    small = model_config("transformer-small")
    assert small.decoder is not None
    assert small.decoder.block == PreNormConfig()


@pytest.mark.parametrize("attention", [Window(4) | Global(1), SoftmaxConfig(pattern=Window(4) | Global(1))])
def test_attention_takes_a_pattern_or_a_mechanism(attention: Any):
    model = create_model("encoder-tiny", attention=attention)
    assert model.config.encoder is not None
    assert model.config.encoder.attention.mechanism == SoftmaxConfig(pattern=Window(4) | Global(1))
    ids = torch.randint(300, (1, 9))
    recorded = model.eval()(ids, output_attentions=True).attentions
    assert recorded[0][0, 0, 2, 7] == 0
    assert recorded[0][0, 0, 2, 0] > 0


def test_a_pattern_leaves_cross_attention_whole():
    """And so decoding with a cache is what it is without: a window has no place over another sequence."""
    model = create_model("transformer-tiny", attention=Causal() & Window(1)).double().eval()
    source, ids = torch.randint(3, 300, (2, 9)), torch.randint(3, 300, (2, 6))
    output = model(source, decoder_input_ids=ids, output_attentions=True)
    assert (output.cross_attentions[0] > 0).all()
    assert output.attentions[0][0, 0, 5, 3] == 0
    state, steps = model.encode(source), []
    for token in ids.split(1, 1):
        step = model(decoder_input_ids=token, state=state)
        state = step.state
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, 1), output.logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gtp2", {}, "unknown model 'gtp2': did you mean 'gpt2'"),
        ("bert", {}, "unknown model 'bert': did you mean 'bert-base' or 'bert-large'"),
        (
            "decision-transformer",
            {},
            "unknown model 'decision-transformer': did you mean 'dt-atari' or 'dt-gym' or 'dt-tiny'",
        ),
        ("gpt2", {"num_layers": 3}, "unknown option of ModelConfig 'num_layers': did you mean"),
        ("gpt2", {"vocab_size": "many"}, "vocab_size: expected int, got 'many'"),
        ("gpt2", {"vocab_size": 0}, "vocab_size: expected 1 or more, got 0"),
        ("gpt2", {"block": "prenorm"}, "unknown kind of block 'prenorm'"),
        (
            "gpt2",
            {"encoder.num_hidden_layers": 3},
            "unknown option of ModelConfig 'encoder.num_hidden_layers'",
        ),
        ("bert-base", {"attention": 3}, "attention: expected a kind"),
    ],
)
def test_what_is_wrong_is_named(name: str, overrides: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        model_config(name, overrides)
    assert str(caught.value).startswith(message)


def test_a_users_preset_joins_the_list():
    @register("test-mine")
    def mine():
        """Mine."""
        return model_config("encoder-tiny", {"vocab_size": 50})

    try:
        assert "test-mine" in list_models()
        assert create_model("test-mine").config.vocab_size == 50
        with pytest.raises(InputError, match="model 'test-mine' is registered already"):
            register("test-mine")
    finally:
        del MODELS._items["test-mine"]


def test_a_row_is_a_preset_with_its_description_and_its_fields():
    row = MODELS["gpt2-medium"]
    assert isinstance(row, SizedPreset)
    assert (row.name, row.layers, row.width, row.heads) == ("gpt2-medium", 24, 1024, 16)
    assert row.__doc__ == row.description
    variant = MODELS["alibi-small"]
    assert isinstance(variant, Variant)
    assert variant() == model_config("decoder-small", {"position": "alibi"})
