"""generation_config.json: files as the hub has them, and what is refused."""

import pytest
import torch
from tiny_models import BOS, EOS, VOCAB, decoder, pair, prompts

from polyformer import GenerationConfig, InputError
from polyformer.models.generation import (
    BeamConfig,
    ConstraintConfig,
    SamplingConfig,
    SpecialIds,
    WholeLengthConfig,
)
from polyformer.models.generation.hub_format import (
    IGNORED_FIELDS,
    SUPPORTED_FIELDS,
    UNSUPPORTED_FIELDS,
    from_hub,
)

SUMMARIES = {
    "_from_model_config": True,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "early_stopping": True,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "length_penalty": 2.0,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "pad_token_id": 1,
    "transformers_version": "4.27.0",
}


def test_a_summarizer_is_read():
    assert from_hub(SUMMARIES) == GenerationConfig(
        max_new_tokens=None,
        whole=WholeLengthConfig(max_length=142, min_length=56),
        constraints=ConstraintConfig(forced_bos_token_id=0, forced_eos_token_id=(2,), no_repeat_ngram_size=3),
        special=SpecialIds(start=2, eos=(2,), pad=1),
        beam=BeamConfig(num_beams=4, normalization="length", length_penalty=2.0, early_stopping=True),
    )


def test_defaults_are_those_of_transformers():
    assert from_hub({}) == GenerationConfig(max_new_tokens=20)
    assert from_hub({"do_sample": True}).sampling == SamplingConfig(do_sample=True, top_k=50)
    beam = BeamConfig(num_beams=3, normalization="length", length_penalty=1.0, early_stopping=False)
    assert from_hub({"num_beams": 3}).beam == beam
    assert from_hub({"max_length": None, "top_p": 0.5, "temperature": 0.3}) == from_hub({})


def test_new_tokens_come_before_whole_lengths():
    config = from_hub({"max_new_tokens": 5, "max_length": 9, "min_new_tokens": 2, "min_length": 4})
    assert (config.max_new_tokens, config.min_new_tokens, config.whole) == (5, 2, WholeLengthConfig())


def test_limits_that_limit_nothing_are_none():
    hub = {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    assert from_hub(hub).sampling == SamplingConfig(do_sample=True)


def test_fields_are_found_among_those_of_a_model():
    old = {
        "model_type": "t5",
        "d_model": 512,
        "num_beams": 2,
        "eos_token_id": 1,
        "vocab_size": 9,
        "task_specific_params": {"summarization": {"max_length": 200, "prefix": "sum up: "}},
    }
    assert from_hub(old).beam.num_beams == 2
    assert from_hub(old).max_new_tokens == 20
    bart = {"architectures": ["A"], "force_bos_token_to_be_generated": True, "bos_token_id": 7}
    assert from_hub(bart).constraints.forced_bos_token_id == 7


@pytest.mark.parametrize(
    ("data", "config"),
    [
        (
            {"max_length": 9, "min_length": 3},
            {"max_new_tokens": None, "whole": WholeLengthConfig(max_length=9, min_length=3)},
        ),
        (
            {"min_new_tokens": 3, "repetition_penalty": 1.2, "stop_strings": ["a", "b"]},
            {"max_new_tokens": 20, "min_new_tokens": 3, "repetition_penalty": 1.2, "stop": ("a", "b")},
        ),
        (
            {"eos_token_id": [4, 5], "pad_token_id": 0, "max_new_tokens": 7, "num_return_sequences": 1},
            {"max_new_tokens": 7, "special": SpecialIds(eos=(4, 5), pad=0)},
        ),
        (
            {
                "max_new_tokens": 7,
                "bad_words_ids": [[1], [2, 3]],
                "suppress_tokens": [4],
                "begin_suppress_tokens": [5, 6],
            },
            {
                "max_new_tokens": 7,
                "constraints": ConstraintConfig(
                    bad_words_ids=((1,), (2, 3)), suppress_tokens=(4,), begin_suppress_tokens=(5, 6)
                ),
            },
        ),
        (
            {"do_sample": True, "top_k": 9, "top_p": 0.4, "min_p": 0.1, "typical_p": 0.9, "temperature": 0.5},
            {
                "max_new_tokens": 20,
                "sampling": SamplingConfig(
                    do_sample=True, top_k=9, top_p=0.4, min_p=0.1, typical_p=0.9, temperature=0.5
                ),
            },
        ),
    ],
)
def test_fields_are_settings(data, config):
    assert from_hub(data) == GenerationConfig(**config)


def test_every_field_of_transformers_is_known():
    transformers = pytest.importorskip("transformers")
    fields = set(transformers.GenerationConfig().to_dict())
    assert not fields - SUPPORTED_FIELDS - UNSUPPORTED_FIELDS.keys() - IGNORED_FIELDS
    assert (
        not SUPPORTED_FIELDS & UNSUPPORTED_FIELDS.keys()
        | SUPPORTED_FIELDS & IGNORED_FIELDS
        | UNSUPPORTED_FIELDS.keys() & IGNORED_FIELDS
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size: .* no counterpart for 3"),
        ({"renormalize_logits": True}, "renormalize_logits: .* no counterpart for True; set it to null"),
        ({"penalty_alpha": 0.6, "num_beams": 4}, "penalty_alpha and num_beams"),
        ({"cache_implementation": "quantized"}, "cache_implementation: 'quantized' changes the numbers"),
        ({"num_beams": 2, "do_sample": True}, "do_sample and num_beams: beam search does not sample"),
        ({"num_beam": 2}, "unknown field of generation_config.json 'num_beam': did you mean 'num_beams'"),
        ({"max_new_tokens": "5"}, "max_new_tokens: expected int, got '5'"),
        ({"bad_words_ids": [[]]}, "bad_words_ids: expected words of one token or more"),
        ({"suppress_tokens": [4], "forced_bos_token_id": 4}, "forced_bos_token_id and suppress_tokens"),
        ({"num_beams": 2, "early_stopping": "often"}, "early_stopping"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(data, message):
    with pytest.raises(InputError, match=message):
        from_hub(data)


def test_special_tokens_of_the_generation_come_before_the_models():
    for seed in range(3):
        model, ids = decoder(seed), prompts(2, 4, seed)
        plain = model.generate(ids, config=GenerationConfig(max_new_tokens=8, special=SpecialIds(eos=())))
        assert plain.lengths.tolist() == [8, 8]
        ends = tuple({row[3] for row in plain.new_tokens()})
        asked = GenerationConfig(max_new_tokens=8, special=SpecialIds(eos=ends, pad=BOS))
        got = model.generate(ids, config=asked)
        for row, whole, filled in zip(got.new_tokens(), plain.new_tokens(), got.sequences[:, 4:].tolist()):
            first = min(whole.index(end) for end in ends if end in whole)
            assert row == whole[: first + 1]
            assert set(filled[first + 1 :]) <= {BOS}
    other = GenerationConfig(max_new_tokens=6, special=SpecialIds(start=5))
    model, ids = pair(0), prompts(1, 4)
    first = model(ids, decoder_input_ids=torch.tensor([[5]])).logits[0, -1].argmax()
    assert model.generate(ids, config=other).new_tokens()[0][0] == first


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            GenerationConfig(max_new_tokens=None, whole=WholeLengthConfig(max_length=4)),
            "max_length: the text begins with 4 tokens .* and may have 4; raise it",
        ),
        (
            GenerationConfig(max_new_tokens=5, special=SpecialIds(eos=(EOS, VOCAB))),
            "special.eos: expected ids from 0 to 12, got",
        ),
        (
            GenerationConfig(max_new_tokens=5, constraints=ConstraintConfig(suppress_tokens=(99,))),
            "suppress_tokens: expected ids",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        decoder().generate(prompts(1, 4), config=config)
