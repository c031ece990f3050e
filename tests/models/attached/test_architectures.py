"""Every architecture in the table, with our attention and with transformers' own."""

from typing import Any

import pytest
import torch
from attached_models import (
    BY_NAME,
    KINDS,
    OURS,
    WINDOWED,
    answer,
    assert_equal,
    build,
    double,
    doubles,
    inputs,
    no_float32,
    of,
    padding,
    reference,
    token_ids,
    with_gradients,
)

import polyformer
from polyformer.attention.functional import parts
from polyformer.attention.patterns import Window
from polyformer.models.attached.architectures import ARCHITECTURES
from polyformer.models.attached.mask import Description
from tolerances import assert_rounded


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The contexts of our attention's calls; masks are never made of n x n entries."""
    contexts: list[Any] = []

    def counted(*tensors: Any, **options: Any) -> Any:
        contexts.append(options["context"])
        return polyformer.attend(*tensors, **options)

    def dense(self: Description) -> None:
        raise AssertionError("a mask was made of all its entries")

    monkeypatch.setattr(parts, "attend", counted)
    monkeypatch.setattr(Description, "dense", dense)
    return contexts


def names(kind: str) -> list[str]:
    return [name for name, architecture in BY_NAME.items() if architecture.kind == kind]


def test_there_are_forty_and_more():
    assert len(BY_NAME) >= 40
    assert len(BY_NAME) == len(ARCHITECTURES)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_transformers(kind: str, calls: list[Any]):
    for name in names(kind):
        with of(name):
            calls.clear()
            model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
            ours = with_gradients(model, OURS, **batch)
            assert len(calls) >= 2, "its layers dispatch"
            assert_equal(ours, with_gradients(model, reference(BY_NAME[name]), **batch))


@pytest.mark.parametrize("name", WINDOWED)
def test_its_own_windows_are_kept(name: str, calls: list[Any]):
    architecture = BY_NAME[name]
    assert architecture.window is not None
    model, batch = build(architecture, **architecture.window), inputs(architecture)
    ours = with_gradients(model, OURS, **batch)
    assert len(calls) >= 2
    assert_equal(ours, with_gradients(model, reference(architecture), **batch))
    wide = build(architecture, **wide_window(architecture.window))
    assert not torch.allclose(answer(wide, **batch), ours["answer"], atol=1e-4), "a window hides something"


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_attached_is_the_models_own(name: str):
    architecture = BY_NAME[name]
    assert architecture.window is not None
    own = build(architecture, **architecture.window)
    wide = build(architecture, **wide_window(architecture.window))
    wide.load_state_dict(own.state_dict())
    kinds = getattr(own.config, "layer_types", None) or ["sliding_attention"] * 2
    layers = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    window = Window(3, 0) if architecture.kind == "decoder" else Window(4)
    polyformer.attach(wide, window, layers=layers)
    batch = inputs(architecture)
    ours = with_gradients(wide, OURS, **batch)
    assert_equal(ours, with_gradients(own, reference(architecture), **batch))


def wide_window(window: Any) -> dict[str, Any]:
    """The same options with a window that hides nothing."""
    return {name: 1000 if isinstance(size, int) and size in (4, 8) else size for name, size in window.items()}


def assert_writes_the_same(model: Any, name: str, **options: Any) -> None:
    """Tokens, and the logits of every step, are those of transformers' own attention."""
    ours = written(model, name, OURS, **options)
    theirs = written(model, name, reference(BY_NAME[name]), **options)
    with no_float32(model):
        exact = written(double(model), name, reference(BY_NAME[name]), **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.sequences, exact.sequences)
    for mine, other, value in zip(ours.logits, theirs.logits, exact.logits, strict=True):
        assert_rounded(mine, other, value)


def written(model: Any, name: str, implementation: str, **options: Any) -> Any:
    """What greedy search writes, with the logits."""
    model.set_attn_implementation(implementation)
    batch = inputs(BY_NAME[name])
    batch = batch if model.dtype == torch.float32 else doubles(batch)
    batch.pop("decoder_input_ids", None)
    if BY_NAME[name].kind == "decoder":  # padding behind a text is not continued
        batch["attention_mask"] = padding(right=0)
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, **options}
    return model.generate(
        **batch, pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options
    )


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder", "speech to text"])
def test_greedy_search_writes_the_same(kind: str, calls: list[Any]):
    for name in names(kind):
        with of(name):
            calls.clear()
            assert_writes_the_same(build(BY_NAME[name]), name)
            assert any(context.q_len == 1 and context.kv_len > 1 for context in calls), "a cache is used"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "Gemma3", "GptOss", "Cohere2"])
def test_windows_with_caches(name: str, cache: str):
    """Caches that keep the last keys alone, and caches of fixed size."""
    model = build(BY_NAME[name], **BY_NAME[name].window or {})
    assert_writes_the_same(model, name, cache_implementation=cache)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2", "T5", "Bart"])
def test_static_caches(name: str):
    assert_writes_the_same(build(BY_NAME[name]), name, cache_implementation="static")


@pytest.mark.parametrize("name", ["Llama", "Bart"])
def test_beams(name: str):
    assert_writes_the_same(build(BY_NAME[name]), name, num_beams=3)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "Qwen2", "Cohere2"])
def test_packed_rows_are_the_texts_alone(name: str, calls: list[Any]):
    """Positions that begin anew say where a text begins."""
    architecture = BY_NAME[name]
    model = build(architecture, **architecture.window or {})
    model.set_attn_implementation(OURS)
    ids, lengths = token_ids()[:1], [6, 1, 5]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    assert calls[0].q_doc is not None
    alone, exact = (
        torch.cat([each(text).logits for text in ids.split(lengths, 1)], 1) for each in (model, double(model))
    )
    assert_rounded(packed, alone, exact)
