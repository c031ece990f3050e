"""Settings by name, over those of a configuration or of the checkpoint."""

from typing import Any

import pytest
import torch
from tiny_models import BOS, EOS, SPECIAL, decoder, pair, prompts

from polyformer import GenerationConfig, InputError
from polyformer.models.config import SpecialTokens
from polyformer.models.generation import BeamConfig, SamplingConfig, SpecialIds, WholeLengthConfig
from polyformer.models.generation.config import with_settings

SAMPLING = GenerationConfig(sampling=SamplingConfig(do_sample=True, temperature=0.5))


@pytest.mark.parametrize(
    ("base", "settings", "expected"),
    [
        (GenerationConfig(), {}, GenerationConfig()),
        (GenerationConfig(), {"max_new_tokens": 3}, GenerationConfig(max_new_tokens=3)),
        (GenerationConfig(), {"temperature": 0.5, "do_sample": True}, SAMPLING),
        (SAMPLING, {"do_sample": False}, GenerationConfig()),
        (SAMPLING, {"do_sample": False, "num_beams": 4}, GenerationConfig(beam=BeamConfig(num_beams=4))),
        (
            GenerationConfig(beam=BeamConfig(num_beams=4, length_penalty=1.0)),
            {"num_beams": 1},
            GenerationConfig(),
        ),
        (
            GenerationConfig(max_new_tokens=None, whole=WholeLengthConfig(max_length=9)),
            {"max_new_tokens": 3},
            GenerationConfig(max_new_tokens=3),
        ),
        (
            GenerationConfig(),
            {"max_length": 9},
            GenerationConfig(max_new_tokens=None, whole=WholeLengthConfig(max_length=9)),
        ),
        (
            GenerationConfig(),
            {"eos_token_id": 3, "pad_token_id": 4, "stop_strings": "x"},
            GenerationConfig(special=SpecialIds(eos=(3,), pad=4), stop=("x",)),
        ),
        (GenerationConfig(), {"sampling": SamplingConfig(do_sample=True, temperature=0.5)}, SAMPLING),
    ],
)
def test_settings_stand_over_those_there(
    base: GenerationConfig, settings: dict[str, Any], expected: GenerationConfig
):
    assert with_settings(base, settings) == expected


@pytest.mark.parametrize("family", [decoder, pair])
def test_generate_takes_them_by_name(family: Any):
    model, ids = family(3), prompts(2, 5)
    config = GenerationConfig(max_new_tokens=7, min_new_tokens=7, beam=BeamConfig(num_beams=3))
    expected = model.generate(ids, config=config).sequences
    got = model.generate(ids, max_new_tokens=7, min_new_tokens=7, num_beams=3).sequences
    assert torch.equal(got, expected)
    model.generation = {"max_new_tokens": 2, "min_new_tokens": 2}
    assert model.generate(ids).lengths.tolist() == [2, 2]
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3).lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_token": 3}, "unknown argument or setting of generate 'max_new_token': did you mean"),
        (
            {"temprature": 3},
            "unknown argument or setting of generate 'temprature': did you mean 'temperature'",
        ),
        ({"temperature": 0.5}, "temperature: only sampling uses it; set do_sample"),
        ({"max_new_tokens": "3"}, "max_new_tokens: expected int, got '3'"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 to 1048576, got 0"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        decoder().generate(prompts(1, 3), **settings)
    assert str(caught.value).startswith(message)


def test_without_a_text_a_decoder_begins_with_its_first_token():
    model = decoder(1)
    expected = model.generate(torch.tensor([[BOS]]), max_new_tokens=5).sequences
    assert torch.equal(model.generate(max_new_tokens=5).sequences, expected)
    bare = decoder(1, special=SpecialTokens(eos=EOS))
    assert torch.equal(bare.generate(max_new_tokens=5, start=BOS).sequences, expected)
    for text in ("a text", ["a text"]):
        with pytest.raises(InputError, match=r"input_ids: expected token ids .* torch.tensor\(\[tokenizer"):
            model.generate(text)
    with pytest.raises(InputError, match=r"input_ids: expected token ids .* got None; .* special\.bos"):
        bare.generate()
    with pytest.raises(InputError, match=r"special\.start: expected ids from 0 to 12, got \[99\]"):
        bare.generate(start=99, max_new_tokens=2)
    with pytest.raises(InputError, match=r"input_ids: expected the source .* got None"):
        pair(1, special=SPECIAL).generate()
