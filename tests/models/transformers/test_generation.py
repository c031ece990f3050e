"""transformers' generation over our state writes what it writes over transformers' own model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from twins import texts, transformers, twins

import polyformer
from polyformer.core.errors import InputError
from polyformer.models import transformers as hub
from polyformer.models.presets import create_model

WRITERS = [
    ("gpt2", "LMHeadModel"),
    ("gptj", "ForCausalLM"),
    ("gpt_neo", "ForCausalLM"),
    ("ctrl", "LMHeadModel"),
    ("openai-gpt", "LMHeadModel"),
    ("bart", "ForCausalLM"),
    ("bart", "ForConditionalGeneration"),
    ("m2m_100", "ForConditionalGeneration"),
    ("t5", "ForConditionalGeneration"),
]
LEFT = {"gpt2", "gptj", "gpt_neo"}
"""Families whose generation tells positions apart from padding."""


def prompts(family: str) -> dict[str, torch.Tensor]:
    """Three texts, padded on the left where the family takes a mask."""
    ids = texts(3, 7)[:, :6]
    mask = torch.ones_like(ids)
    if family in LEFT:
        mask[1, :2] = mask[2, :4] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


class Favour(transformers.LogitsProcessor):
    """Likes the tokens that stand far from the last one."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + (torch.arange(scores.shape[1]) - input_ids[:, -1:]).abs() / 10


class Enough(transformers.StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "sampling": {"do_sample": True, "top_k": 7, "temperature": 2.0, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "processor": {"logits_processor": transformers.LogitsProcessorList([Favour()])},
    "criterion": {"stopping_criteria": transformers.StoppingCriteriaList([Enough()])},
    "processors": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "no end": {"eos_token_id": None},
    "dictionary": {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "eos_token_id": None,
    },
    "chunks": {"prefill_chunk_size": 2},
}


def generated(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    torch.manual_seed(5)
    return model.generate(**inputs, **{"max_new_tokens": 8, "do_sample": False, **options})


@pytest.mark.parametrize(("family", "task"), WRITERS)
def test_texts(family: str, task: str):
    ours, theirs = twins(family, task)
    for name, options in OPTIONS.items():
        if name == "chunks" and family not in LEFT:
            continue
        actual, expected = (generated(model, prompts(family), options) for model in (ours, theirs))
        if name == "dictionary":
            for kind in ("scores", "logits"):
                for tensor, other in zip(actual[kind], expected[kind], strict=True):
                    torch.testing.assert_close(tensor, other, rtol=1e-4, atol=1e-4)
            actual, expected = actual.sequences, expected.sequences
        assert torch.equal(actual, expected), name


def test_seeds_repeat_texts():
    ours, _ = twins("gpt2", "LMHeadModel")
    options = {"do_sample": True, "temperature": 3.0}
    first, again = (generated(ours, prompts("gpt2"), options) for _ in range(2))
    assert torch.equal(first, again)


def test_streams():
    ours, _ = twins("gpt2", "LMHeadModel")

    class Collect(transformers.generation.BaseStreamer):
        parts: list[torch.Tensor] = []  # noqa: RUF012

        def put(self, value: torch.Tensor) -> None:
            self.parts.append(value.flatten())

        def end(self) -> None:
            self.parts.append(torch.tensor([-1]))

    text = ours.generate(
        texts(1, 5), max_new_tokens=4, do_sample=False, eos_token_id=None, streamer=Collect()
    )
    assert torch.cat(Collect.parts).tolist() == [*text[0].tolist(), -1]


def test_an_assistant_changes_nothing():
    ours, theirs = twins("gpt2", "LMHeadModel")
    assistant, _ = twins("gpt2", "LMHeadModel", n_layer=1)
    ids = texts(1, 5)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    assert torch.equal(
        ours.generate(ids, assistant_model=assistant, **options), theirs.generate(ids, **options)
    )


@pytest.mark.parametrize(("family", "task"), WRITERS)
def test_caches_go_on(family: str, task: str):
    """What an output returns is taken by the next call, which then reads the new tokens alone."""
    ours, theirs = twins(family, task)
    ids, more = texts(2, 12), {}
    name = "input_ids"
    if theirs.config.is_encoder_decoder:
        more, name = {"input_ids": texts(2, 9)}, "decoder_input_ids"
    with torch.no_grad():
        expected = theirs(**{name: ids}, **more).logits
        cache, logits = None, []
        for part in ids.split([5, 1, 6], 1):
            output = ours(**{name: part}, past_key_values=cache, use_cache=True, **more)
            cache = output.past_key_values
            logits.append(output.logits)
            assert cache.get_seq_length() == sum(chunk.shape[1] for chunk in logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        cache.crop(-6)
        again = ours(**{name: ids[:, 6:]}, past_key_values=cache, **more).logits
    torch.testing.assert_close(again, expected[:, 6:], rtol=1e-4, atol=1e-4)


def test_a_mechanism_without_keys_and_values_writes_with_its_own_state():
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 40}
    inner = create_model("decoder-tiny", **sizes, mechanism="performer", position="sinusoidal").eval()
    ours, ids = hub.wrap(inner), texts(2, 6)
    for options in ({}, {"num_beams": 3}):
        actual = ours.generate(ids, max_new_tokens=6, do_sample=False, **options)
        whole = ours.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, **options)
        assert torch.equal(actual, whole)
    cache = ours(ids).past_key_values
    assert cache.get_seq_length() == 6
    with pytest.raises(InputError, match="past_key_values: the state of this model, sums of"):
        cache.crop(1)
    theirs = transformers.DynamicCache()
    for layer in range(2):
        theirs.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), layer)
    with pytest.raises(InputError, match="past_key_values: the state of this model has more"):
        ours(ids, past_key_values=theirs)


@pytest.mark.parametrize("family", ["gpt2", "t5", "bart"])
def test_settings_are_kept(family: str, tmp_path: Path):
    """generation_config.json comes with the model and leaves with it."""
    ours, theirs = twins(family, {"gpt2": "LMHeadModel"}.get(family, "ForConditionalGeneration"))
    theirs.generation_config = transformers.GenerationConfig(
        num_beams=2,
        max_new_tokens=5,
        eos_token_id=[2, 7],
        pad_token_id=0,
        repetition_penalty=1.3,
        decoder_start_token_id=3,
    )
    theirs.save_pretrained(tmp_path / "theirs")
    ours = hub.wrap(polyformer.from_pretrained(tmp_path / "theirs"))
    ours.save_pretrained(tmp_path / "ours")
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if ours.config.is_encoder_decoder
        else transformers.AutoModelForCausalLM
    )
    again = auto.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    expected = theirs.generate(**prompts(family))
    for model in (ours, again):
        assert model.generation_config.to_diff_dict() == theirs.generation_config.to_diff_dict()
        assert torch.equal(model.generate(**prompts(family)), expected)
    assert polyformer.from_pretrained(tmp_path / "ours").generation["num_beams"] == 2


def test_a_source_that_was_read_before():
    ours, theirs = twins("bart", "ForConditionalGeneration")
    source, target = texts(2, 9), texts(2, 5)
    read = theirs.get_encoder()(source)
    expected = theirs(encoder_outputs=read, decoder_input_ids=target).logits
    torch.testing.assert_close(ours(encoder_outputs=read, decoder_input_ids=target).logits, expected)
    torch.testing.assert_close(ours.get_encoder()(source).last_hidden_state, read.last_hidden_state)
    text = ours.generate(encoder_outputs=read, max_new_tokens=4, do_sample=False)
    assert torch.equal(text, theirs.generate(encoder_outputs=read, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@pytest.mark.parametrize("family", ["gpt2", "gptj", "gpt_neo", "llama"])
def test_vectors_in_place_of_ids(family: str, options: dict[str, Any]):
    ours, theirs = twins(family, "LMHeadModel" if family == "gpt2" else "ForCausalLM")
    vectors = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, **options}
    expected = theirs.generate(inputs_embeds=vectors, **settings)
    assert torch.equal(ours.generate(inputs_embeds=vectors, **settings), expected)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_memory_drops_what_transformers_mask_still_counts(beams: int):
    """The mask grows with the text, the state does not."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"position": "rope", "memory": "recurrent(length=5)", "initializer_range": 0.3}
    model = create_model("decoder-tiny", vocab_size=50, hidden_size=32, num_attention_heads=2, **options)
    ids = torch.randint(3, 50, (2, 6))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    expected = model.eval().generate(ids, mask, max_new_tokens=20, num_beams=beams).sequences
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "num_beams": beams}
    assert torch.equal(hub.wrap(model).generate(ids, attention_mask=mask, **settings), expected)
