"""What layers hand over beside a mask: biases, caps, sinks, dropout, masks of their own; weights, graphs."""

import itertools
from typing import Any

import pytest
import torch
from attached_models import (
    BY_NAME,
    OURS,
    answer,
    assert_all_rounded,
    build,
    double,
    doubles,
    inputs,
    no_float32,
    token_ids,
    with_gradients,
)
from torch import Tensor, nn
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

import polyformer
from polyformer import InputError
from polyformer.models.attached.attention import forward
from tolerances import assert_rounded

IDS = token_ids()


@pytest.mark.parametrize("name", ["Llama", "Bert", "Gemma2", "GptOss", "T5", "Bart", "ViT"])
def test_weights_are_those_of_eager_attention(name: str):
    model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
    model.set_attn_implementation("eager")
    theirs = model(**batch, output_attentions=True)
    with no_float32(model):
        exact = double(model)(**doubles(batch), output_attentions=True)
    model.set_attn_implementation(OURS)
    ours = model(**batch, output_attentions=True)
    for kind in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        for weights, *others in zip(
            *(output.get(kind) or () for output in (ours, theirs, exact)), strict=True
        ):
            sees = weights.sum(-1, keepdim=True) > 0  # a padded query sees nothing here, and all there
            assert_rounded(weights, *(other * sees for other in others))
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
    results = []
    for implementation, twin in ((OURS, model), ("sdpa", model), ("sdpa", double(model))):
        entries = mask if twin is model or not mask.is_floating_point() else mask.detach().double()
        entries = entries.requires_grad_() if kind == "learned" else entries
        results.append(with_gradients(twin, implementation, input_ids=IDS, attention_mask=entries))
        if kind == "learned":
            results[-1]["mask"] = entries.grad.clone()
            entries.grad = None
    assert_all_rounded(*results)
    assert kind != "learned" or results[0]["mask"].abs().max() > 0


@pytest.mark.parametrize("name", ["Gemma2", "GptOss", "T5"])
def test_terms_of_the_model_go_with_a_pattern(name: str):
    """Caps, sinks and biases with a window and ALiBi, in tiles as in one product."""
    model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
    polyformer.attach(model, "Window(3) | Global(1)", position="alibi")
    results = []
    for backend, kind, entries in (
        ("tiled", model, batch),
        ("definition", model, batch),
        ("definition", double(model), doubles(batch)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            by = lambda *x, backend=backend, **y: polyformer.attend(*x, **{**y, "backend": backend})  # noqa: E731
            patch.setattr("polyformer.attention.functional.parts.attend", by)
            results.append(with_gradients(kind, OURS, **entries))
    assert_all_rounded(*results)


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


def named(ids: Tensor, ends: list[int], compiled: bool = False) -> Tensor:
    """The last states of a BERT whose layer is told where sequences end."""
    model = build(BY_NAME["Bert"], num_hidden_layers=1)
    model.set_attn_implementation(OURS)
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    seq_lens = torch.tensor(ends, dtype=torch.int32)
    return run(ids, cu_seq_lens_q=seq_lens, cu_seq_lens_k=seq_lens)[0]


@pytest.mark.parametrize("ends", [[0, 5], [0, 5, 8], [0, 5, 5, 8, 8], [0, 12], [0, 5, 12]])
def test_tokens_after_the_last_sequence_are_one_of_their_own(ends: list[int]):
    ids, used = IDS[:1], sorted({*ends, IDS.shape[1]})
    packed = named(ids, ends)
    for start, stop in itertools.pairwise(used):
        changed = ids.clone()
        changed[:, :start] = 7
        changed[:, stop:] = 7
        torch.testing.assert_close(
            named(changed, ends)[:, start:stop], packed[:, start:stop], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("ends", [[0, 5], [0, 5, 8], [0, 5, 5, 8, 8], [0, 12], [0, 5, 12]])
def test_a_graph_is_told_where_sequences_end(ends: list[int]):
    ids = IDS[:1]
    torch.testing.assert_close(named(ids, ends, compiled=True), named(ids, ends), rtol=0, atol=1e-5)


def test_sequences_of_several_rows_count_all_tokens():
    plain = named(IDS, [0, 12, 24])
    apart = named(IDS, [0, 12, 17, 24])
    torch.testing.assert_close(apart[0], plain[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(apart[1:], named(IDS[1:], [0, 5, 12]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "ends", [[0, 5, 13], [1, 5, 12], [0, 7, 5, 12], [0, -1, 12], [0], [[0, 12]]], ids=str
)
def test_sequences_that_do_not_divide_a_row_are_refused(ends: Any):
    with pytest.raises(InputError, match=r"^cu_seq_lens_q: expected "):
        named(IDS[:1], ends)


def test_a_sequence_in_two_rows_is_refused():
    with pytest.raises(InputError, match=r"^cu_seq_lens_q: expected no sequence in two"):
        named(IDS, [0, 5, 24])


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
    for name in ("cache", "block_indices", "sinks"):
        options: dict[str, Any] = {name: torch.zeros(1)}
        with pytest.raises(InputError, match=f"^{name}: "):
            forward(nn.Identity(), q, q, q, None, **options)


def test_layers_attend_to_the_keys_that_their_indexers_choose():
    """DeepSeek-V3.2, whose layers choose different keys: logits, and generation with padding."""
    sizes = {
        "kv_lora_rank": 8,
        "q_lora_rank": 9,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 6,
    }
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    indexer = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 8}
    config = DeepseekV32Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        pad_token_id=0,
        **sizes,
        **experts,
        **indexer,
    )
    torch.manual_seed(0)
    model = DeepseekV32ForCausalLM(config).eval()
    ids = torch.randint(3, 50, (2, 11))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected, text = model(ids, attention_mask=mask).logits, model.generate(ids, **options)
        polyformer.attach(model)
        actual = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
        assert torch.equal(model.generate(ids, **options), text)
    for name, rule in (("memory", "sinks(first=1, length=4)"), ("cache", "snapkv(budget=64)")):
        with pytest.raises(InputError, match=f"^{name}: indexers of this model choose keys"):
            polyformer.attach(model, **{name: rule})


@pytest.mark.parametrize("pattern", [None, "Window(3) | Global(1)"])
def test_a_graph_of_the_whole_model(pattern: str | None):
    """`fullgraph=True` traces a model, masks as entries; the outputs are the same."""
    model = build(BY_NAME["Llama"], num_hidden_layers=1)
    model.set_attn_implementation(OURS)
    if pattern:
        polyformer.attach(model, pattern)
    expected = model(IDS, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected, rtol=0, atol=1e-5)
