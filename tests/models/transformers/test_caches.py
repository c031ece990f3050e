"""transformers' own caches: wrapped models fill them in place and continue from them, as theirs do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache
from twins import texts, twins

from pairwise import pairwise
from polyformer.core.errors import InputError
from polyformer.models import transformers as hub
from polyformer.models.presets import create_model

DECODERS = [
    ("gpt2", "LMHeadModel"),
    ("gptj", "ForCausalLM"),
    ("gpt_neo", "ForCausalLM"),
    ("ctrl", "LMHeadModel"),
    ("llama", "ForCausalLM"),
    ("mistral", "ForCausalLM"),
    ("qwen2", "ForCausalLM"),
    ("bart", "ForCausalLM"),
]
BOTH = [
    ("bart", "ForConditionalGeneration"),
    ("m2m_100", "ForConditionalGeneration"),
    ("t5", "ForConditionalGeneration"),
]
CACHES: dict[str, Callable[[Any], Any]] = {
    "empty": lambda config: DynamicCache(),
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config=config, max_cache_len=24),
}
PARTS = [6, 1, 9, 1, 7]


def read(model: Any, cache: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """Logits of `ids` in parts, which must all move the same `cache` on."""
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    logits, seen = [], int(cache.get_seq_length())
    for part in ids.split(PARTS, 1):
        output = model(**{name: part}, past_key_values=cache, use_cache=True, **more)
        assert output.past_key_values is cache
        seen += part.shape[1]
        assert int(cache.get_seq_length()) == seen
        logits.append(output.logits)
    return torch.cat(logits, 1)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "task"), DECODERS)
@torch.no_grad()
def test_filled_in_place(family: str, task: str):
    ours, theirs = twins(family, task)
    ids = texts(2, 24)
    expected = theirs(ids, use_cache=False).logits
    for kind, build in CACHES.items():
        cache = build(theirs.config)
        same(read(ours, cache, ids), expected)
        if kind != "static" and not any(cache.is_sliding):
            cache.crop(-10)
            cache.batch_repeat_interleave(2)
            again = ours(ids[:, 14:].repeat_interleave(2, 0), past_key_values=cache).logits
            same(again[::2], expected[:, 14:])
        with pytest.raises(InputError, match="past_key_values: expected keys of"):
            ours(ids[:1], past_key_values=cache)


@pytest.mark.parametrize(
    ("which", "kind", "dtype"), pairwise(BOTH, [*CACHES], [torch.float32, torch.bfloat16])
)
@torch.no_grad()
def test_both_sides_are_filled(which: tuple[str, str], kind: str, dtype: torch.dtype):
    ours, theirs = twins(*which, dtype)
    ids = texts(2, 24)
    source = {"input_ids": ids.flip(1)[:, :9], "attention_mask": torch.ones(2, 9)}
    source["attention_mask"][1, 5:] = 0
    caches = []
    for model in (ours, theirs):
        cache = EncoderDecoderCache(*(CACHES[kind](theirs.config) for _ in range(2)))
        if kind == "static":
            cache.cross_attention_cache = StaticCache(config=theirs.config, max_cache_len=9)
        caches.append((cache, read(model, cache, ids, **source)))
    (cache, actual), (_, expected) = caches
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert cache.is_updated == dict.fromkeys(range(2), True)


@pytest.mark.parametrize(
    ("which", "options", "kind"),
    pairwise([DECODERS[0], DECODERS[5], DECODERS[6], BOTH[0]], [{}, {"num_beams": 3}], [*CACHES]),
)
def test_generation_continues_from_them(which: tuple[str, str], options: dict[str, Any], kind: str):
    ours, theirs = twins(*which)
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, **options}
    sequences = []
    for model in (ours, theirs):
        cache = CACHES[kind](theirs.config)
        if theirs.config.is_encoder_decoder:
            cache = EncoderDecoderCache(cache, DynamicCache())
        text = model.generate(texts(2, 8), past_key_values=cache, **settings)
        if not theirs.config.is_encoder_decoder and not options:
            more = torch.cat([text, texts(2, 3)], 1)
            text = model.generate(more, past_key_values=cache, **settings | {"max_new_tokens": 4})
        sequences.append(text)
    assert torch.equal(*sequences)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_implementations_that_generate_takes(kind: str):
    ours, theirs = twins("llama", "ForCausalLM")
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "cache_implementation": kind}
    assert torch.equal(ours.generate(texts(2, 8), **settings), theirs.generate(texts(2, 8), **settings))


@pytest.mark.parametrize("position", ["rope", "alibi", "t5", "shaw", "learned"])
def test_padding_before_the_text(position: str):
    """The mask of all tokens says where it is."""
    torch.manual_seed(0)
    ours = hub.wrap(create_model("decoder-tiny", position=position, vocab_size=40, initializer_range=0.3))
    ids, mask = texts(2, 24), torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    expected = ours.eval()(ids, attention_mask=mask).logits
    cache = DynamicCache()
    parts = [
        ours(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        for start, stop in ((0, 8), (8, 9), (9, 24))
    ]
    same(torch.cat(parts, 1)[mask.bool()], expected[mask.bool()])


def test_gradients_flow_through_them():
    ours, theirs = twins("gptj", "ForCausalLM")
    tables = []
    for model in (ours, theirs):
        cache = DynamicCache()
        read(model, cache, texts(2, 24)).square().sum().backward()
        tables.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_recomputing_fills_once():
    ours, _ = twins("gptj", "ForCausalLM")
    ours.train().gradient_checkpointing_enable()
    cache = DynamicCache()
    with torch.enable_grad():
        ours(texts(2, 8), past_key_values=cache).logits.sum().backward()
    assert cache.get_seq_length() == 8


@torch.no_grad()
def test_caches_that_do_not_fit_are_refused():
    ours, theirs = twins("gpt2", "LMHeadModel")
    other, _ = twins("gpt2", "LMHeadModel", n_layer=1)
    ids, cache = texts(2, 8), DynamicCache()
    other(ids, past_key_values=cache)
    cases = [
        (cache, "keys and values of 2 layers, got DynamicCache with 1 of [8] tokens"),
        (StaticCache(config=theirs.config, max_cache_len=5), "capacity of 5 tokens, got 8; create it with"),
        (QuantizedCache("fp8", theirs.config), "got Fp8QuantizedLayer; use DynamicCache()"),
        (((ids, ids),), "a cache of transformers such as DynamicCache(), got tuple"),
    ]
    for past, message in cases:
        with pytest.raises(InputError, match="past_key_values: ") as error:
            ours(ids, past_key_values=past)
        assert message in str(error.value)
    narrow = DynamicCache(config=twins("mistral", "ForCausalLM", sliding_window=4)[1].config)
    ours(ids, past_key_values=narrow)
    with pytest.raises(InputError, match="layer 0 of the cache has dropped its first 5 tokens"):
        ours(ids, past_key_values=narrow)
    assert narrow.get_seq_length() == 8
