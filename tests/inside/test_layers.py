"""What layers hand over beside a mask: biases, caps, sinks, dropout, masks of their own; weights, graphs."""

from typing import Any

import pytest
import torch
from torch import nn

import polyformer
from inside.models import BY_NAME, OURS, answer, build, inputs, token_ids, with_gradients
from polyformer import InputError
from polyformer.inside.attention import forward

IDS = token_ids()


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma2", "GptOss", "T5", "Bart", "ViT"])
def test_weights_are_those_of_eager_attention(name: str):
    model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
    weights: dict[str, Any] = {}
    for implementation in ("eager", OURS):
        model.set_attn_implementation(implementation)
        weights[implementation] = model(**batch, output_attentions=True)
    for kind in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if not weights["eager"].get(kind):
            continue
        for ours, theirs in zip(weights[OURS][kind], weights["eager"][kind], strict=True):
            sees = ours.sum(-1, keepdim=True) > 0  # a padded query sees nothing here, and all there
            torch.testing.assert_close(ours, theirs * sees, rtol=0, atol=1e-5)
    torch.testing.assert_close(answer(model, **batch), answer(model, **batch, output_attentions=True))


@pytest.mark.parametrize("kind", ["bool", "float", "heads", "learned", "flat"])
def test_masks_of_a_models_own(kind: str):
    """Four axes of bool or numbers, from a caller or a model; or padding alone."""
    model = build(BY_NAME["Llama"])
    generator = torch.Generator().manual_seed(0)
    seen = (torch.rand(2, 1, 12, 12, generator=generator) < 0.5) | torch.eye(12, dtype=torch.bool)
    numbers = torch.randn(2, 1 if kind == "float" else 4, 12, 12, generator=generator)
    mask: Any = seen
    if kind in ("float", "heads"):
        mask = numbers.masked_fill(~seen, torch.finfo(torch.float32).min)
    if kind == "learned":
        mask = nn.Parameter(numbers)
    if kind == "flat":
        layer, q = nn.Identity(), torch.randn(2, 4, 12, 8, generator=generator)
        padded = torch.ones(2, 12)
        padded[0, :5] = 0
        out, _ = forward(layer, q, q, q, padded)
        expected = nn.functional.scaled_dot_product_attention(q, q, q, padded[:, None, None].bool())
        torch.testing.assert_close(out.transpose(1, 2), expected)
        return
    grads = []
    for implementation in (OURS, "sdpa"):
        result = with_gradients(model, implementation, input_ids=IDS, attention_mask=mask)
        grads.append(mask.grad.clone() if kind == "learned" else torch.zeros(()))
        mask.grad = None
        grads.append(result["answer"])
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grads[1], grads[3], rtol=0, atol=1e-5)
    assert kind != "learned" or grads[0].abs().max() > 0


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "T5"])
def test_terms_of_the_model_go_with_a_pattern(name: str):
    """Caps, sinks and biases with a window and ALiBi, in tiles as in one product."""
    model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
    polyformer.attach(model, "Window(3) | Global(1)", position="alibi")
    results = []
    for backend in ("definition", "tiled"):
        with pytest.MonkeyPatch.context() as patch:
            by = lambda *x, backend=backend, **y: polyformer.attend(*x, **{**y, "backend": backend})  # noqa: E731
            patch.setattr("polyformer.inside.attention.attend", by)
            results.append(with_gradients(model, OURS, **batch))
    for key, tensor in results[0].items():
        torch.testing.assert_close(results[1][key], tensor, rtol=1e-4, atol=1e-6)


def test_dropout_drops_weights_in_training_alone():
    model = build(BY_NAME["Bert"], attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    model.set_attn_implementation(OURS)
    assert torch.equal(model(IDS)[0], model(IDS)[0])
    model.train()
    assert not torch.allclose(model(IDS)[0], model(IDS)[0], atol=1e-3)
    q = torch.randn(1, 1, 400, 8)
    out, _ = forward(nn.Identity(), q, q, torch.ones_like(q), None, dropout=0.5, is_causal=False)
    assert abs(float(out.mean()) - 1) < 0.05, "weights that stay are scaled"


def test_sequences_that_flash_attention_names():
    """Encoders get no positions that begin anew, but a collator may say where sequences end."""
    model = build(BY_NAME["Bert"])
    model.set_attn_implementation(OURS)
    ends = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)]).unsqueeze(0)
    packed = model(IDS[:1], position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends)[0]
    alone = torch.cat([model(text)[0] for text in IDS[:1].split([5, 1, 6], 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def test_gradient_checkpointing():
    model = build(BY_NAME["Llama"])
    expected = with_gradients(model, OURS, input_ids=IDS)
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    checkpointed = with_gradients(model, OURS, input_ids=IDS)
    for name, tensor in expected.items():
        torch.testing.assert_close(checkpointed[name], tensor)


def test_what_would_be_lost_is_refused():
    q = torch.randn(1, 2, 3, 4)
    for name in ("cache", "indices", "block_indices", "sinks"):
        options: dict[str, Any] = {name: torch.zeros(1)}
        with pytest.raises(InputError, match=f"^{name}: "):
            forward(nn.Identity(), q, q, q, None, **options)


@pytest.mark.parametrize("pattern", [None, "Window(3) | Global(1)"])
def test_a_graph_of_the_whole_model(pattern: str | None):
    """`fullgraph=True` traces a model, masks as entries; the outputs are the same."""
    model = build(BY_NAME["Llama"])
    model.set_attn_implementation(OURS)
    if pattern:
        polyformer.attach(model, pattern)
    expected = model(IDS, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected, rtol=0, atol=1e-5)
