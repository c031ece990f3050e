"""`attach`, `detach`, `explain`, and what a saved model remembers of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from attached_models import BY_NAME, KINDS, OURS, answer, build, double, inputs, of, token_ids
from torch import Tensor, nn

import polyformer
from polyformer import Context, Full, Global, InputError, PerHead, Window
from polyformer.models.attached.attention_layers import attention_layers
from polyformer.models.attached.layer import attached
from tolerances import assert_rounded

IDS = token_ids(20)


def llama(**options: Any) -> Any:
    """A decoder of two layers and four heads on two key heads."""
    return build(BY_NAME["Llama"], **options)


def custom_mask(pattern: Any, heads: int = 4) -> Tensor:
    """A pattern and the past as a mask [2, H, 20, 20], which transformers' own attention takes."""
    context, q_idx = Context(20, 20), torch.arange(20)
    places = torch.zeros(1, 1, 1, dtype=torch.long), torch.arange(heads).view(-1, 1, 1)
    mask = pattern.mask(context, *places, q_idx.view(-1, 1), q_idx)
    past = q_idx.view(-1, 1) >= q_idx
    return (mask & past).expand(2, heads, 20, 20)


@pytest.mark.parametrize(
    "pattern",
    [Window(3) | Global(1), PerHead((Window(2), Full(), Window(5), Global(2)))],
    ids=["one", "heads"],
)
def test_a_pattern_is_the_mask_of_its_pairs(pattern: Any):
    model = llama()
    expected = model(IDS, attention_mask=custom_mask(pattern)).logits
    full = model(IDS).logits
    assert polyformer.attach(model, pattern) is model
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(full, expected, atol=1e-3)
    polyformer.detach(model)
    assert torch.equal(model(IDS).logits, full)
    assert model.config._attn_implementation == "sdpa"
    assert not [
        name for name in model.config.to_dict() if "polyformer" in name or name == "attn_implementation"
    ]


def test_text_layers_and_later_calls():
    model = llama()
    polyformer.attach(model, "PerLayer([Window(2), Window(5) | Global(1)])")
    polyformer.attach(model, Window(7), layers=0)
    assert str(polyformer.explain(model)).splitlines() == [
        "model.layers.0.self_attn  polyformer: its own mask and Window(before=7, after=7, dilation=1)",
        "model.layers.1.self_attn  polyformer: its own mask and "
        "(Window(before=5, after=5, dilation=1) | Global(tokens=1))",
    ]
    polyformer.attach(model, "Window(3)")
    assert len(model.config.polyformer_attention) == 1, "what it replaced is forgotten"
    polyformer.detach(model)
    assert str(polyformer.explain(model)) == (
        "model.layers.0.self_attn .. model.layers.1.self_attn  sdpa, its own mask"
    )


def test_what_a_cache_writes_is_what_one_pass_reads():
    """Positions of global tokens count the text's own tokens, behind padding too."""
    model = polyformer.attach(llama(), "Window(3) | Global(2)", position="alibi")
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(IDS, **options)
    assert torch.equal(cached, model.generate(IDS, use_cache=False, **options))
    alone = model.generate(IDS[:1, 6:], **{**options, "attention_mask": mask[:1, 6:]})
    assert torch.equal(cached[:1, 20:], alone[:, 14:])


def test_packed_texts_have_global_tokens_of_their_own():
    model = polyformer.attach(llama(), "Window(2) | Global(1)", position="alibi")
    lengths = [9, 1, 10]
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    packed = model(IDS[:1], position_ids=positions, use_cache=False).logits
    alone = [model(text).logits for text in IDS[:1].split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-5)


def test_alibi_is_its_biases():
    model = build(BY_NAME["Bert"])
    distance = (torch.arange(20).view(-1, 1) - torch.arange(20)).abs()
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]).view(-1, 1, 1)
    expected = model(IDS, attention_mask=(-slopes * distance).expand(2, -1, -1, -1))[0]
    polyformer.attach(model, position="alibi")
    torch.testing.assert_close(model(IDS)[0], expected, rtol=0, atol=1e-5)


def test_biases_that_are_learned_begin_at_zero_and_learn():
    model = llama()
    full, exact = model(IDS).logits, double(model)(IDS).logits
    polyformer.attach(model, position="t5(num_buckets=8, max_distance=16)")
    out = model(IDS).logits
    assert_rounded(out, full, exact)
    out.square().mean().backward()
    for layer in model.model.layers:
        assert layer.self_attn.polyformer.position.table.weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_score_mod_and_a_mask_mod(name: str):
    """After a cap too, and by the numbers of tokens where a cache holds the first ones."""
    model = build(BY_NAME[name])

    def even(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx % 2 == 0) | (q_idx == kv_idx)

    def nearer(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - 0.05 * (q_idx - kv_idx) ** 2

    polyformer.attach(model, even, score_mod=nearer)
    assert "a mask_mod, score_mod nearer" in str(polyformer.explain(model))
    whole = model(IDS).logits
    first = model(IDS[:, :13], use_cache=True)
    rest = model(IDS[:, 13:], past_key_values=first.past_key_values).logits
    distance = torch.arange(20).view(-1, 1) - torch.arange(20)
    seen = (distance >= 0) & ((torch.arange(20) % 2 == 0) | (distance == 0))
    bias = torch.where(seen, -0.05 * distance**2, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)
    polyformer.detach(model)
    if name == "Gemma2":
        model.set_attn_implementation("eager")
    theirs = model(IDS, attention_mask=bias).logits
    exact = double(model)(IDS, attention_mask=bias.double()).logits
    assert_rounded(whole, theirs, exact)
    assert_rounded(torch.cat([first.logits, rest], 1), theirs, exact)


def test_sides_of_a_model_by_name():
    model = build(BY_NAME["Bart"])
    polyformer.attach(model, "Window(2)", layers="encoder")
    lines = polyformer.explain(model).lines
    assert lines["model.encoder.layers.1.self_attn"].endswith("Window(before=2, after=2, dilation=1)")
    assert lines["model.decoder.layers.0.self_attn"] == "polyformer: its own mask"
    assert lines["model.decoder.layers.0.encoder_attn"] == "polyformer: cross-attention, its own mask"
    both = polyformer.attach(build(BY_NAME["CLIP"]), "Window(2)", layers=["text_model.*.1", "vision_model"])
    assert [layer.name for layer in attention_layers(both) if attached(layer.module)] == [
        "text_model.encoder.layers.1.self_attn",
        "vision_model.encoder.layers.0.self_attn",
        "vision_model.encoder.layers.1.self_attn",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_takes_a_pattern(kind: str):
    """A pattern of everything changes nothing, a window does, and cross-attention is left alone."""
    for name, architecture in BY_NAME.items():
        if architecture.kind == kind:
            with of(name):
                check_patterns(name)


def check_patterns(name: str) -> None:
    model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
    before, implementation = answer(model, **batch), model.config._attn_implementation
    layers = [layer for layer in attention_layers(model) if not layer.cross]
    assert len(layers) >= (1 if name == "Albert" else 2)
    polyformer.attach(model, "Full()")
    torch.testing.assert_close(answer(model, **batch), before, rtol=1e-4, atol=1e-5)
    polyformer.attach(model, "Window(1)")
    assert (answer(model, **batch) - before).abs().max() > 1e-4
    assert not any(attached(layer.module) for layer in attention_layers(model) if layer.cross)
    polyformer.detach(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(answer(model, **batch), before)


@pytest.mark.parametrize("name", ["Llama", "Bert", "CLIP", "T5", "ModernBert"])
def test_a_saved_model_remembers(name: str, tmp_path: Path):
    model, batch = build(BY_NAME[name]), inputs(BY_NAME[name])
    position = "t5(num_buckets=8, max_distance=16)"
    polyformer.attach(model, "PerHead([Window(2) | Global(1), Window(3)])", position=position)
    polyformer.attach(model, "Window(1)", layers=1)
    tables = [p for key, p in model.named_parameters() if ".polyformer." in key]
    for table in tables:
        nn.init.normal_(table)
    expected = answer(model, **batch)
    for folder in ("first", "second"):
        model.save_pretrained(tmp_path / folder)
        model = getattr(transformers, BY_NAME[name].model).from_pretrained(tmp_path / folder).eval()
        assert torch.equal(answer(model, **batch), expected)
    assert tables
    assert model.config._attn_implementation == OURS


def test_loaded_without_us_it_is_refused_and_not_run_densely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    polyformer.attach(llama(), "Window(2)").save_pretrained(tmp_path)
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, OURS)
    with pytest.raises(ValueError, match='Specified `attn_implementation="polyformer"` is not supported'):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_functions_are_not_saved(tmp_path: Path):
    model = polyformer.attach(llama(), lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="saved with functions attached"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, polyformer_attention=None)


def test_a_config_that_was_changed_by_hand_is_refused(tmp_path: Path):
    polyformer.attach(llama(), "Window(2)").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, message in (
        ([{"pattern": "Window(2)"}], "expected the fields that `attach` writes"),
        ([{"attention": "Windw(2)"}], "unknown pattern 'Windw'"),
        ("Window(2)", "expected a list written by `attach`"),
        (5, "expected a list written by `attach`, got 5"),
        ([5], "expected the fields that `attach` writes, got 5"),
        ([{"functions": 5}], "saved with functions attached"),
        ([{"functions": [5]}], "saved with functions attached"),
        ([{"layers": 1.5}], "layers: expected numbers or names of layers, got 1.5"),
        ([{}] * 20_000, "polyformer_attention: calls: expected at most 1024, got 20000"),
        ([{"layers": ["*"] * 1024}], "calls and names of layers: expected at most 1024, got 1025"),
        ([{"attention": "Full() | " * 9000 + "Full()"}], "characters: expected at most 65536"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "polyformer_attention": wrong}))
        with pytest.raises(InputError, match=message):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_wrong_arguments():
    model = llama()
    attach: Any = polyformer.attach
    for arguments, options, message in (
        (("Windw(3)",), {}, "unknown pattern 'Windw'"),
        ((3,), {}, "attention: expected a Pattern, its text or a mask_mod"),
        (("Window(3)",), {"layers": [2]}, "no self-attention layer is called 2; there are model.layers"),
        (("Window(3)",), {"layers": "encoder"}, "no self-attention layer is called 'encoder'"),
        (("Window(3)",), {"layers": []}, "layers: expected numbers or names"),
        (("Window(3)",), {"layers": 1.5}, "layers: expected numbers or names of layers, got 1.5"),
        ((), {"position": "rope"}, "position: 'rope' is not added to scores"),
        ((), {"position": "transformer_xl"}, "take 'alibi' or 't5'"),
        ((), {"position": "shaw"}, "position: 'shaw' is not added to scores"),
        ((), {"position": "alibo"}, "alibo"),
        ((), {"score_mod": 3}, "score_mod: expected a function, got 3"),
    ):
        with pytest.raises(InputError) as error:
            attach(model, *arguments, **options)
        assert message in str(error.value)
    assert model.config._attn_implementation == "sdpa", "nothing was changed"
    with pytest.raises(InputError, match="attach: expected a model of transformers first, got 'x'"):
        attach("x", "Window(3)")
    with pytest.raises(InputError, match="no layer of Linear asks"):
        polyformer.attach(nn.Linear(2, 2), "Window(3)")
    with pytest.raises(InputError, match="no layer of Linear asks"):
        polyformer.explain(nn.Linear(2, 2))
    with pytest.raises(InputError, match="nothing is attached to this LlamaForCausalLM"):
        polyformer.detach(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_around_a_model_and_inside():
    """LoRA before and after `attach`: what PEFT wraps is still attention."""
    peft = pytest.importorskip("peft")
    expected = polyformer.attach(llama(), "Window(2)")(IDS).logits
    options = peft.LoraConfig(target_modules=["q_proj"], r=2)
    outside = peft.get_peft_model(polyformer.attach(llama(), "Window(2)"), options)
    inside = polyformer.attach(peft.get_peft_model(llama(), options), "Window(2)")
    for model in (outside, inside):
        torch.testing.assert_close(model(IDS).logits, expected)
        assert len(polyformer.explain(model).lines) == 2


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("mpnet", r"convert it: polyformer.from_pretrained\(FOLDER, attention=...\) reads 'mpnet'"),
        ("bloom", r"convert it: .* reads 'bloom' as a model of this library"),
        ("led", r"convert it: .* reads 'led' as a model of this library"),
        ("xlnet", r"convert it: .* reads 'xlnet' as a model of this library"),
        ("layoutlmv3", "it cannot be converted either, since 'layoutlmv3' needs positions on a page"),
    ],
)
def test_a_model_that_does_not_dispatch_names_the_way_that_is_left(kind: str, way: str):
    options = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
    options |= {"visual_embed": False, "coordinate_size": 1, "shape_size": 2, "intermediate_size": 8}
    if kind == "layoutlmv3":
        options |= {"hidden_size": 12, "coordinate_size": 2, "shape_size": 2}
    if kind == "led":
        options = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 9}
        options |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "attention_window": 4}
    if kind == "xlnet":
        options = {"d_model": 8, "n_head": 2, "n_layer": 1, "d_inner": 8, "vocab_size": 9}
    config = transformers.AutoConfig.for_model(kind, **options)
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(InputError, match=f"asks transformers' AttentionInterface what to run; {way}"):
        polyformer.attach(model, Window(3))
