"""Presets of encoders without an origin are saved as their own family: what another lacks it refuses."""

import pytest

from polyformer.checkpoints.save import find_family
from polyformer.presets import model_config

EXPECTED = {
    "bert-large": ("bert", "ForMaskedLM"),
    "roberta-base": ("roberta", "ForMaskedLM"),
    "distilbert-base": ("distilbert", "ForMaskedLM"),
    "albert-base": ("albert", "ForMaskedLM"),
    "electra-small": ("electra", "ForPreTraining"),
    "electra-base-generator": ("electra", "ForMaskedLM"),
    "xlm-mlm-en-2048": ("xlm", "WithLMHeadModel"),
    "xlm-clm-ende-1024": ("xlm", "WithLMHeadModel"),
}


@pytest.mark.parametrize(("preset", "expected"), EXPECTED.items())
def test_a_preset_is_of_its_family(preset: str, expected: tuple[str, str]):
    family, hub, task = find_family(model_config(preset))
    assert (family.model_type, task) == expected
    assert family.config(hub, task) == model_config(preset)
