"""Layers that take turns, and layers that share what their mechanisms learn."""

import pytest

from polyformer.attention.mechanisms import AlternateConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Window
from polyformer.core.errors import InputError
from polyformer.models.presets import create_model

NEAR, WHOLE = SoftmaxConfig(pattern=Window(2, 0)), SoftmaxConfig()


def test_layers_take_turns() -> None:
    model = create_model(
        "decoder-tiny", attention=AlternateConfig(mechanisms=(NEAR, WHOLE)), num_hidden_layers=3
    )
    assert model.decoder is not None
    kinds = [layer.attention.mechanism.config for layer in model.decoder.layers]  # type: ignore[union-attr]
    assert kinds == [NEAR, WHOLE, NEAR]


def test_a_file_brings_them_back() -> None:
    config = AlternateConfig(mechanisms=(NEAR, WHOLE))
    assert MechanismConfig.from_json(config.to_json()) == config


def test_what_one_cannot_the_stack_cannot() -> None:
    from polyformer.attention.patterns import GlobalEnd

    mixed = AlternateConfig(mechanisms=(NEAR, SoftmaxConfig(pattern=GlobalEnd(1))))
    assert mixed.supports_packing
    with pytest.raises(InputError, match="mechanism 'alternate' cannot run in a decoder"):
        create_model("decoder-tiny", attention=mixed)


def test_none_is_refused() -> None:
    with pytest.raises(InputError, match="mechanisms: expected 1 mechanism or more, got none"):
        AlternateConfig(mechanisms=())


def test_ties_are_made_with_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention

    tied: list[tuple[object, object]] = []
    monkeypatch.setattr(SoftmaxAttention, "share_parameters", lambda self, first: tied.append((self, first)))
    model = create_model("decoder-tiny", num_hidden_layers=3)
    assert model.decoder is not None
    first, *others = (layer.attention.mechanism for layer in model.decoder.layers)  # type: ignore[union-attr]
    assert tied == [(other, first) for other in others]
