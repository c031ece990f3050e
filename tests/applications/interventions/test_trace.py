"""Traces against hooks and attention functions by hand, for transformers' models and converted models."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.attached.architectures import BART, GPT, HEADS

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
LAYER, HEAD, WIDTH = 1, 2, 8
PART = slice(HEAD * WIDTH, (HEAD + 1) * WIDTH)
"""The rows of the output projection that read the head."""


def build(kind: str, config: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, kind)
    model = model_class(model_class.config_class(**{**config, **options})).double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return build("GPT2LMHeadModel", GPT)


@pytest.fixture(scope="module", params=["unattached", "attached", "converted"])
def traced(request: pytest.FixtureRequest, gpt2: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model to trace; the hooks by hand are on `gpt2`."""
    if request.param == "converted":
        return converted(gpt2, tmp_path_factory.mktemp("gpt2"))
    model = build("GPT2LMHeadModel", GPT)
    return polyformer.attach(model) if request.param == "attached" else model


def converted(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return polyformer.from_pretrained(folder).double().eval()


@contextlib.contextmanager
def hook(module: nn.Module, change: Callable[[Any], Any], output: bool = False) -> Iterator[None]:
    """Change the first argument of a module, or its output."""
    if output:
        handle = module.register_forward_hook(lambda *call: change(call[2]))
    else:
        handle = module.register_forward_pre_hook(lambda _, arguments: (change(arguments[0]),))
    try:
        yield
    finally:
        handle.remove()


def result(model: Any, ids: Tensor = IDS) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the embeddings for a loss."""
    embedding = next(parameter for parameter in model.parameters() if parameter.shape == (64, 32))
    logits = model(ids).logits
    (gradient,) = torch.autograd.grad(logits.square().sum().sqrt(), embedding)
    return logits, gradient


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], changed: Any) -> None:
    """Both are the same, and not what the model computes without an intervention."""
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(actual[0], changed, rtol=1e-3)


def test_an_ablated_head_has_no_rows_in_the_output_projection(traced: Any, gpt2: Any):
    def zeroed(heads: Tensor) -> Tensor:
        return torch.cat([heads[..., : PART.start], 0 * heads[..., PART], heads[..., PART.stop :]], -1)

    with hook(gpt2.transformer.h[LAYER].attn.c_proj, zeroed):
        expected = result(gpt2)
    plain = traced(IDS).logits
    with polyformer.trace(traced) as calls:
        calls.layer(LAYER).head(HEAD).output.set(0)
        assert_same(result(traced), expected, plain)
    assert torch.equal(traced(IDS).logits, plain), "the model is restored"


def test_a_head_is_patched_from_another_text(traced: Any, gpt2: Any):
    projection, heads = gpt2.transformer.h[LAYER].attn.c_proj, []
    with hook(projection, lambda x: heads.append(x) or x):
        gpt2(OTHER)
    with hook(projection, lambda x: torch.cat([x[..., : PART.start], heads[0][..., PART.start :]], -1)):
        expected = gpt2(IDS).logits
    chosen = range(HEAD, 4)
    with polyformer.trace(traced) as calls:
        kept = calls.layer(LAYER).head(*chosen).output.keep()
        traced(OTHER)
    assert kept[0].shape == (2, len(chosen), 7, WIDTH)
    with polyformer.trace(traced) as calls:
        calls.layer(LAYER).head(*chosen).output.set(kept[0])
        assert_same((traced(IDS).logits,), (expected,), traced(OTHER).logits)


def by_hand(mask: Tensor, weigh: Callable[[Tensor], Tensor]) -> Any:
    """An attention function of transformers: causal, and in the layer masked, with changed weights."""

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Any:
        chosen = module.layer_idx == LAYER
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        scores = (q @ k.mT / q.shape[3] ** 0.5).masked_fill(
            ~(causal & mask if chosen else causal), -torch.inf
        )
        weights = weigh(scores.softmax(-1)) if chosen else scores.softmax(-1)
        return (weights @ v).transpose(1, 2), None

    return attention


def run_by_hand(model: Any, mask: Tensor, weigh: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("by_hand", by_hand(mask, weigh))
    model.set_attn_implementation("by_hand")
    try:
        return result(model)
    finally:
        model.set_attn_implementation(before)


def test_cut_edges_are_a_mask_of_the_head(traced: Any, gpt2: Any):
    near = torch.ones(7, 7, dtype=torch.bool).triu(-2)  # distances 0, 1, 2
    mask = torch.ones(4, 7, 7, dtype=torch.bool)
    mask[[0, HEAD]] = near
    expected = run_by_hand(gpt2, mask, lambda weights: weights)
    plain = traced(IDS).logits
    with polyformer.trace(traced) as calls:
        calls.layer(LAYER).head(0, HEAD).limit("Window(2)")
        weights = calls.layer(LAYER).weights.keep()
        assert_same(result(traced), expected, plain)
    assert torch.equal(
        weights[0] > 0, (mask & torch.ones(7, 7, dtype=torch.bool).tril()).expand(2, -1, -1, -1)
    )


def test_changed_weights_mix_the_values(traced: Any, gpt2: Any):
    def change(weights: Tensor) -> Tensor:
        return weights.square()

    expected = run_by_hand(
        gpt2,
        torch.ones(7, 7, dtype=torch.bool),
        lambda w: torch.stack([w[:, 0], *change(w[:, 1:]).unbind(1)], 1),
    )
    plain = traced(IDS).logits
    with polyformer.trace(traced) as calls:
        calls.layer(LAYER).head(1, 2, 3).weights.edit(change)
        assert_same(result(traced), expected, plain)


def test_the_residual_stream_is_changed_before_and_after_a_layer(traced: Any, gpt2: Any):
    block = gpt2.transformer.h[LAYER]
    steer = torch.linspace(-1, 1, 32, dtype=torch.float64)
    after = lambda y: y - steer if isinstance(y, Tensor) else (y[0] - steer, *y[1:])  # noqa: E731
    plain = traced(IDS).logits
    with hook(block, lambda x: 2 * x), hook(block, after, output=True):
        expected = result(gpt2)
    with polyformer.trace(traced) as calls:
        calls.layer(LAYER).input.edit(lambda x: 2 * x)
        calls.layer(LAYER).residual.edit(lambda y: y - steer)
        stream = calls.layer(LAYER).residual.keep()
        assert_same(result(traced), expected, plain)
    assert stream[0].shape == (2, 7, 32)
    assert stream[0].requires_grad


def test_each_step_of_generation_is_a_call(traced: Any):
    with polyformer.trace(traced) as calls, torch.no_grad():
        layer = calls.layer(LAYER)
        layer.head(HEAD).output.set(0)
        layer.head(0).limit("Window(3)")
        weights, outputs = layer.weights.keep(), layer.output.keep()
        output = traced.generate(IDS[:1], max_new_tokens=4)
    ours = not isinstance(output, Tensor)
    tokens = torch.cat([IDS[:1], torch.tensor(output.new_tokens())], 1) if ours else output
    assert [tuple(each.shape) for each in weights[1:]] == [(1, 4, 1, 7 + step) for step in (1, 2, 3)]
    assert {tuple(each.shape) for each in outputs[1:]} == {(1, 4, 1, WIDTH)}
    with polyformer.trace(traced) as calls, torch.no_grad():
        calls.layer(LAYER).head(HEAD).output.set(0)
        calls.layer(LAYER).head(0).limit("Window(3)")
        logits = traced(tokens[:, :-1]).logits
    assert torch.equal(logits[:, 6:].argmax(-1), tokens[:, 7:])


@pytest.mark.parametrize("kind", ["attached", "converted"])
def test_stacks_and_cross_attention_of_an_encoder_decoder(kind: str, tmp_path: Path):
    bart = build("BartForConditionalGeneration", BART)
    model = (
        converted(bart, tmp_path)
        if kind == "converted"
        else polyformer.attach(build(bart.__class__.__name__, BART))
    )
    inputs = {"input_ids": IDS, "decoder_input_ids": OTHER[:, :5]}

    def zeroed(heads: Tensor) -> Tensor:
        return F.pad(heads[..., WIDTH:], (WIDTH, 0))

    side, cross = bart.model.encoder.layers[0], bart.model.decoder.layers[1]
    with hook(side.self_attn.out_proj, zeroed), hook(cross.encoder_attn.out_proj, zeroed):
        expected = bart(**inputs).logits
    with polyformer.trace(model) as calls:
        calls.layer(0, "encoder").head(0).output.set(0)
        calls.cross(1).head(0).output.set(0)
        weights = calls.cross(1).weights.keep()
        assert_same((model(**inputs).logits,), (expected,), bart(**inputs).logits)
        with pytest.raises(InputError, match="layer: expected a single layer 0, got 2"):
            calls.layer(0)
    assert weights[0].shape == (2, 4, 5, 7)


def test_layers_that_share_weights_are_changed_separately():
    model = polyformer.create_model("decoder-tiny", num_hidden_layers=3, num_hidden_groups=1).eval()
    with polyformer.trace(model) as calls:
        outputs = [layer.output.keep() for layer in calls.layers]
        calls.layer(1).output.set(0)
        model(IDS)
        calls.layer(1).output.edit(lambda y: y + 1)
        model(IDS)
    zeros = [not output[0].any() for output in outputs]
    assert (zeros, [len(each) for each in outputs]) == ([False, False, False], [2, 2, 2])
    with polyformer.trace(model) as calls:
        calls.layer(1).output.set(0)
        outputs = [layer.output.keep() for layer in calls.layers]
        model(IDS)
    assert [bool(output[0].any()) for output in outputs] == [True, False, True]


def test_traces_nest_and_the_inner_trace_reads_changed_values():
    model = polyformer.create_model("decoder-tiny").eval()
    with polyformer.trace(model) as outer:
        outer.layer(0).weights.set(0)
        outer.layer(1).head(0).limit("Window(2)")
        with polyformer.trace(model) as inner:
            weights, others = (inner.layer(number).weights.keep() for number in (0, 1))
            model(IDS)
    assert not weights[0].any()
    assert [bool(others[0][:, head, -1, 0].all()) for head in (0, 1)] == [False, True]


def test_a_trace_changes_the_calls_of_its_thread_only(traced: Any):
    """Of several threads that call the model at once, each gets what it would get without the others."""
    before = getattr(traced.config, "_attn_implementation", None)
    plain = traced(IDS).logits.detach()
    with polyformer.trace(traced) as calls:
        calls.layer(LAYER).head(HEAD).output.set(0)
        changed = traced(OTHER).logits.detach()
    stop = threading.Event()

    def call() -> list[bool]:
        same = []
        while not stop.is_set():
            same.append(torch.allclose(traced(IDS).logits, plain, rtol=1e-10, atol=1e-10))
        return same

    def trace(_: int) -> bool:
        with polyformer.trace(traced) as calls:
            calls.layer(LAYER).head(HEAD).output.set(0)
            weights, stream = calls.layer(0).weights.keep(), calls.layer(0).residual.keep()
            logits = traced(OTHER).logits
        return len(weights) == len(stream) == 1 and torch.allclose(logits, changed, rtol=1e-10, atol=1e-10)

    with torch.no_grad(), ThreadPoolExecutor(3) as threads:
        plain_calls = threads.submit(call)
        try:
            traces = list(threads.map(trace, range(20)))
        finally:
            stop.set()
    assert plain_calls.result()
    assert all(plain_calls.result())
    assert all(traces)
    torch.testing.assert_close(traced(IDS).logits.detach(), plain, rtol=1e-10, atol=1e-10)
    assert getattr(traced.config, "_attn_implementation", None) == before


def test_unknown_places_and_mechanisms_without_weights_are_named():
    model = polyformer.create_model("decoder-tiny", attention="gla").eval()
    with polyformer.trace(model) as calls:
        with pytest.raises(InputError, match="layer: expected a single layer 9, got 0; there are layer 0 of"):
            calls.layer(9)
        with pytest.raises(InputError, match="head: expected 0 to 3 in layer 1 of the decoder, got 4"):
            calls.layer(1).head(4)
        calls.layer(0).output.set(torch.zeros(3, 1))
        with pytest.raises(InputError, match=r"output of layer 0 .*broadcasts to \(2, 4, 7, "):
            model(IDS)
    with polyformer.trace(model) as calls:
        calls.layer(1).weights.keep()
        with pytest.raises(InputError, match=r"weights: .* layer 1 of the decoder computes no softmax"):
            model(IDS)
    branches = polyformer.create_model("decoder-tiny", attention="nsa").eval()
    with polyformer.trace(branches) as calls:
        calls.layer(0).weights.keep()
        with pytest.raises(InputError, match="weights: expected a single softmax"):
            branches(IDS)
    compressed = polyformer.create_model("decoder-tiny", attention="memory_compressed").eval()
    with polyformer.trace(compressed) as calls:
        calls.layer(0).limit("Window(2)")
        with pytest.raises(InputError, match="pattern: expected a key for each of 7 tokens"):
            compressed(IDS)
    compiled: Any = torch.compile(model, backend="eager")
    with (
        pytest.raises(InputError, match="not compiled"),
        polyformer.trace(compiled),
    ):
        pass
    with pytest.raises(InputError, match="got 'Linear'"), polyformer.trace(nn.Linear(2, 2)):
        pass
    reversible = polyformer.create_model("decoder-tiny", block="reversible")
    with polyformer.trace(reversible) as calls:
        calls.layer(0).output.set(0)
        with pytest.raises(InputError, match="computes its layers again"):
            reversible(IDS)
        with pytest.raises(InputError, match="residual: layer 0 of the decoder has no single"):
            _ = calls.layer(0).residual


def test_block_of_a_bert(tmp_path: Path):
    """Its output projection is outside the attention, and its norm inside the residual stream."""
    bert = build("BertModel", {**HEADS, "max_position_embeddings": 64})
    layer = bert.encoder.layer[0]
    with hook(layer.attention.output.dense, torch.zeros_like):
        expected = bert(IDS).last_hidden_state
    for model in (build("BertModel", {**HEADS, "max_position_embeddings": 64}), converted(bert, tmp_path)):
        with polyformer.trace(model) as calls:
            calls.layer(0).output.set(0)
            assert_same((model(IDS).last_hidden_state,), (expected,), bert(IDS).last_hidden_state)
