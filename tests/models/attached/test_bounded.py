"""Bounded caches in transformers' models: sinks and policies equal their definitions and our own models."""

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attached_models import BY_NAME, build, of
from tests.nn.memory.kept_tokens import FIRST, LENGTH, recomputed, same, text
from torch import Tensor
from transformers import DynamicCache

import polyformer
from polyformer import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence import tokens as reach
from polyformer.models.attached.bounded import BoundedLayer
from tolerances import Double

SINKS = f"sinks(first={FIRST}, length={LENGTH})"
DROPPING = ["snapkv(budget=8, window=3, kernel=3)", "h2o(budget=7)", "expected(budget=8, future=5, sinks=2)"]
POLICIES = [
    *DROPPING,
    "expected(budget=6, sinks=0, int8=true)",
    "h2o(ratio=0.6)",
    "int8",
    "int4(group=4, window=6)",
]
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA = {"rope_parameters": YARN, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def _without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches drop each key as soon as it is out of reach."""
    monkeypatch.setattr(reach, "BLOCK", 1)
    monkeypatch.setattr(reach, "MARGIN", 0)


@contextlib.contextmanager
def doubled(name: str, **options: Any) -> Iterator[Any]:
    """A model that computes everything in float64, its rotations too."""
    own = getattr(transformers, BY_NAME[name].model).__module__
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for module in (own, "transformers.modeling_rope_utils", "transformers.generation.utils"):
            patch.setattr(f"{module}.torch", Double())
        yield build(BY_NAME[name], **options).double()


def in_chunks(model: Any, ids: Tensor, split: list[int], mask: Tensor | None = None) -> Tensor:
    """The logits of calls with a cache."""
    cache, outputs, seen = DynamicCache(config=model.config), [], 0
    for part in ids.split(split, 1):
        seen += part.shape[1]
        own = {} if mask is None else {"attention_mask": mask[:, :seen]}
        outputs.append(model(part, past_key_values=cache, **own).logits)
    return torch.cat(outputs, 1)


SPLITS = [[23], [1] * 23, [4, 1, 1, 9, 8]]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "GPTNeoX", "Cohere", "Glm", "StableLm"])
def test_a_layer_computes_each_step_from_the_kept_tokens(name: str):
    """With all channels and a part of them, in halves and in pairs."""
    options = LLAMA if name == "Llama" else {}
    with doubled(name, num_hidden_layers=1, **options) as model:
        expected = recomputed(lambda ids: model(ids).logits[:, -1], text())
        dense = model(text()).logits
        polyformer.attach(model, memory=SINKS)
        same(model(text(), use_cache=False).logits, expected)
        for split in SPLITS:
            same(in_chunks(model, text(), split), expected)
        assert not torch.allclose(dense, expected, atol=1e-3)


def test_every_decoder_takes_the_memory_or_says_why_not():
    """In two layers one pass is the same as chunks, which drop their keys."""
    refused = {}
    for name, architecture in BY_NAME.items():
        if architecture.kind != "decoder":
            continue
        with of(name), torch.no_grad():
            model = build(architecture)
            try:
                polyformer.attach(model, memory=SINKS)
            except InputError as error:
                refused[name] = str(error)
                assert model.config._attn_implementation == "sdpa"
                continue
            whole = model(text(), use_cache=False).logits
            torch.testing.assert_close(in_chunks(model, text(), [4, 1, 1, 9, 8]), whole, rtol=0, atol=2e-4)
    assert {*refused} == {"DeepseekV3", "OPT", "BioGpt", "GPT2", "GPTBigCode"}
    assert all(message.startswith("memory: ") and "convert" in message for message in refused.values())


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_padded_rows_count_their_own_tokens(split: list[int]):
    with doubled("Llama", **LLAMA) as model:
        polyformer.attach(model, memory=SINKS)
        ids, mask = text(), torch.ones(2, 23, dtype=torch.long)
        mask[0, :9] = 0
        logits = in_chunks(model, ids, split, mask)
        same(logits[0, 9:], model(ids[:1, 9:]).logits[0])
        same(logits[1], model(ids[1:]).logits[0])


def test_a_pattern_and_the_models_own_window_narrow_the_memory():
    with doubled("Mistral", sliding_window=4) as model:
        window = model(text()).logits
        polyformer.attach(model, memory=SINKS)
        same(model(text()).logits, window)
        same(in_chunks(model, text(), [4, 1, 1, 9, 8]), window)
    with doubled("Llama") as model:
        expected = polyformer.attach(model, "Window(2)")(text()).logits
        polyformer.attach(model, "Window(2)", memory=SINKS)
        same(in_chunks(model, text(), [1] * 23), expected)


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
@pytest.mark.parametrize("rule", [{"memory": SINKS}, *({"cache": policy} for policy in POLICIES)], ids=str)
def test_the_model_is_our_model_with_the_same_rule(name: str, rule: dict[str, Any], tmp_path: Path):
    """Logits in float64, and more generated tokens than the cache holds, of padded prompts."""
    options = LLAMA if name == "Llama" else {}
    with doubled(name, **options) as model:
        model.save_pretrained(tmp_path)
        ours = polyformer.from_pretrained(tmp_path, memory=rule.get("memory")).double().eval()
        polyformer.attach(model, **rule)
        ids, mask = text(), torch.ones(2, 14, dtype=torch.long)
        mask[0, :5] = 0
        settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        theirs = model.generate(
            ids[:, :14], attention_mask=mask, output_logits=True, return_dict_in_generate=True, **settings
        )
        state = ours.new_state(cache=rule.get("cache"))
        output = ours(ids[:, :14], attention_mask=mask, state=state)
        for step, token in enumerate(theirs.sequences[:, 14:].unbind(1)):
            same(theirs.logits[step], output.logits[:, -1])
            assert torch.equal(token, output.logits[:, -1].argmax(-1))
            output = ours(token.unsqueeze(1), state=output.state)


@pytest.mark.parametrize("rule", [{"memory": SINKS}, *({"cache": policy} for policy in POLICIES)], ids=str)
def test_beams_follow_their_own_keys(rule: dict[str, Any]):
    with doubled("Llama") as model:
        polyformer.attach(model, **rule)
        settings = {"max_new_tokens": 12, "num_beams": 4, "do_sample": False, "pad_token_id": 0}
        settings |= {"eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
        beams = model.generate(text(length=9), **settings)
        cache, ids = DynamicCache(config=model.config), beams.sequences
        first = [model(ids[:, :9], past_key_values=cache).logits[:, -1:]]
        rest = [model(token, past_key_values=cache).logits for token in ids[:, 9:-1].split(1, 1)]
        logits = torch.cat([*first, *rest], 1).log_softmax(-1)
        scores = logits.gather(2, ids[:, 9:, None]).sum((1, 2)) / 12
        torch.testing.assert_close(beams.sequences_scores.double(), scores, rtol=0, atol=1e-6)


def test_memory_does_not_grow():
    """With 2,000 tokens, in one prompt or in steps, and through `generate`."""
    reach.BLOCK, reach.MARGIN = 64, 64
    model = polyformer.attach(build(BY_NAME["Llama"]), memory="sinks(first=4, length=28)")
    with torch.no_grad():
        cache = model(text(1, 2000)).past_key_values
        sizes = {held_numbers(layer) for layer in cache.layers}
        output = model.generate(
            text(1, 2000), max_new_tokens=300, do_sample=False, return_dict_in_generate=True
        )
    assert all(layer.get_seq_length() == 2000 for layer in cache.layers)
    sizes |= {held_numbers(layer) for layer in output.past_key_values.layers}
    # Keys and values of two heads of 8 channels: at most first + length + a block and a margin, twice.
    assert max(sizes) <= 2 * 2 * 8 * 2 * (4 + 28 + 64 + 64)


def held_numbers(layer: BoundedLayer) -> int:
    """The numbers in a layer's buffers of keys and values."""
    assert isinstance(layer.longer, KeyValueCache)
    tensors = layer.keys, layer.values, layer.longer.keys, layer.longer.values
    buffers = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    assert layer.keys is not None
    storages = {buffer.data_ptr(): buffer.nbytes() for buffer in buffers}
    return sum(storages.values()) // layer.keys.element_size()


def test_a_text_within_the_cache_is_bitwise_as_without_the_memory():
    model = build(BY_NAME["Llama"])
    ids = text(length=LENGTH)
    model.set_attn_implementation("polyformer")
    expected = model(ids).logits
    polyformer.attach(model, memory=SINKS)
    assert torch.equal(model(ids).logits, expected)
    assert not torch.allclose(model(text()).logits[:, -1], polyformer.detach(model)(text()).logits[:, -1])


def test_detach_restores_the_model_and_its_caches():
    model = build(BY_NAME["Llama"])
    expected = model(text()).logits
    rules: list[dict[str, Any]] = [{"memory": SINKS}, {"cache": "h2o(budget=7)"}]
    for rule in rules:
        polyformer.attach(model, **rule)
        twin = copy.deepcopy(model)
        assert isinstance(twin(text()).past_key_values.layers[0], BoundedLayer)
        for own in (polyformer.detach(twin), polyformer.detach(model)):
            output = own(text())
            assert torch.equal(output.logits, expected)
            assert not isinstance(output.past_key_values.layers[0], BoundedLayer)
            assert not any(module._forward_pre_hooks for module in own.modules())


@pytest.mark.parametrize(
    ("rule", "shown"),
    [
        ({"memory": "sinks"}, ["first=4", "length="]),
        ({"cache": "snapkv(budget=1024)"}, ["snapkv(budget=1024", "window="]),
        ({"cache": "int8"}, ["int8"]),
    ],
    ids=str,
)
def test_the_budget_is_explained(rule: dict[str, Any], shown: list[str]):
    text = str(polyformer.explain(polyformer.attach(build(BY_NAME["Llama"]), **rule)))
    assert all(part in text for part in shown), text


def test_a_prompt_is_read_in_chunks():
    model = polyformer.attach(build(BY_NAME["Llama"]), memory=SINKS)
    whole = model.generate(text(), max_new_tokens=6, do_sample=False)
    assert model.generate(text(), max_new_tokens=6, do_sample=False, prefill_chunk_size=5).equal(whole)


def test_a_later_call_replaces_a_memory():
    model = polyformer.attach(build(BY_NAME["Llama"]), memory=SINKS)
    polyformer.attach(model, "Window(3)", layers=0)
    lines = str(polyformer.explain(model)).splitlines()
    assert lines[0].endswith("its own mask and Window(before=3, after=3, dilation=1)")
    assert lines[1].endswith(f"its own mask and {SINKS}")
    layers = model(text()).past_key_values.layers
    assert [isinstance(layer, BoundedLayer) for layer in layers] == [False, True]
    torch.testing.assert_close(in_chunks(model, text(), [9, 1, 13]), model(text()).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [{"memory": SINKS}, {"cache": "h2o(budget=7)"}], ids=str)
def test_a_saved_model_remembers(rule: dict[str, Any], tmp_path: Path):
    model = polyformer.attach(build(BY_NAME["Llama"]), **rule)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    split = [9, 1, 1, 12]
    assert torch.equal(in_chunks(loaded, text(), split), in_chunks(model, text(), split))


def test_gradients_of_one_pass_are_those_of_the_recomputed_steps():
    model = build(BY_NAME["Llama"], num_hidden_layers=1)
    weight = model.model.layers[0].self_attn.q_proj.weight
    recomputed(lambda ids: model(ids).logits[:, -1], text()).square().mean().backward()
    expected, weight.grad = weight.grad, None
    polyformer.attach(model, memory=SINKS)(text(), use_cache=False).logits.square().mean().backward()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-6)


def test_drafts_do_not_change_the_text():
    reach.BLOCK, reach.MARGIN = 64, 64
    model = polyformer.attach(build(BY_NAME["Llama"]), memory=SINKS)
    settings = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    usual = model.generate(text(1), **settings)
    assert torch.equal(model.generate(text(1), prompt_lookup_num_tokens=4, **settings), usual)


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    (
        "Llama",
        {"memory": "recurrent(length=8)"},
        "memory: expected 'sinks', the memory that is only a bounded",
    ),
    ("Llama", {"memory": "sinks(length=0)"}, "length: expected 1 or more, got 0"),
    ("Llama", {"memory": SINKS, "cache": "h2o(budget=7)"}, "memory and cache: expected one of them"),
    ("Llama", {"memory": SINKS, "position": "alibi"}, "memory: expected no position, which reads places"),
    (
        "Llama",
        {"cache": "h2o(budget=7)", "attention": "Window(2)"},
        "cache: expected no attention, which reads places",
    ),
    (
        "Llama",
        {"memory": SINKS, "attention": lambda b, h, q, k: q >= k},
        "memory: expected a pattern with a t",
    ),
    (
        "GPT2",
        {"cache": "expected(budget=8)"},
        "cache: expected rotary positions, which GPT2LMHeadModel lacks",
    ),
    ("Llama", {"cache": "snapkv(budget=32)"}, "budget: expected more keys than the 32 that 'snapkv' always"),
    ("GPT2", {"memory": SINKS}, "memory: expected rotary positions, which GPT2LMHeadModel lacks; convert"),
    ("DeepseekV3", {"memory": SINKS}, "changes its queries by position in another way than a rotation"),
    ("ModernBert", {"memory": SINKS}, "memory: expected decoder layers, but .* reads later tokens"),
    (
        "T5",
        {"cache": "h2o(budget=7)"},
        "cache: expected a decoder without an encoder, got T5ForConditionalGeneration",
    ),
]


@pytest.mark.parametrize(("name", "options", "message"), ERRORS, ids=range(len(ERRORS)))
def test_what_cannot_be_bounded_is_refused(name: str, options: dict[str, Any], message: str):
    model = build(BY_NAME[name])
    with pytest.raises(InputError, match=message):
        polyformer.attach(model, **options)
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_frequencies_by_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0}
    model = build(BY_NAME["Llama"], rope_parameters=rope, max_position_embeddings=32)
    with pytest.raises(
        InputError, match="memory: rope_type 'dynamic' has frequencies that depend on the len"
    ):
        polyformer.attach(model, memory=SINKS)


def test_calls_that_a_bounded_cache_does_not_fit_are_refused():
    model = build(BY_NAME["Llama"])
    filled = model(text()).past_key_values
    polyformer.attach(model, memory=SINKS)
    with pytest.raises(
        InputError, match="past_key_values: with an attached memory, expected a new DynamicCac"
    ):
        model(text(length=1), past_key_values=filled)
    with pytest.raises(
        InputError, match=r"got StaticLayer .*leave out past_key_values and cache_implementat"
    ):
        model.generate(text(), cache_implementation="static", max_new_tokens=2)
    with pytest.raises(InputError, match=r"attention_mask: .*expected \[batch, tokens\]"):
        model(text(), attention_mask=torch.ones(2, 1, 23, 23, dtype=torch.bool))
    with pytest.raises(InputError, match="crop: 3 tokens cannot be removed"):
        model(text()).past_key_values.crop(-3)
    capped = polyformer.attach(build(BY_NAME["Gemma2"]), cache="h2o(budget=7)")
    with pytest.raises(InputError, match="cache: the layer adds 'softcap' to its scores"):
        capped(text())


def test_budgets_by_layer_are_attached_and_budgets_by_head_are_refused():
    inside = "snapkv(budget=8, window=3, kernel=3)"
    model = polyformer.attach(build(BY_NAME["Llama"]), cache=f"pyramid(of={inside}, slope=0.8)")
    with torch.no_grad():
        cache = model(text(1, 24), use_cache=True).past_key_values
    held = [layer.keys.shape[2] for layer in cache.layers]
    assert (held[0], held[-1], sum(held)) == (11, 5, 8 * len(held))
    with pytest.raises(InputError, match=r"^cache: expected the same number of keys in each head.*'ada'"):
        polyformer.attach(build(BY_NAME["Llama"]), cache=f"pyramid(of=ada(of={inside}))")
