"""Conversion of every family to every attention that can see all of a text: no number changes.

With room for longer texts too, from the tables of families and mechanisms; and the reports are true.
"""

import functools
from typing import Any

import pytest
import torch
from family_table import TEXTS, tiny
from reports import checked
from torch import Tensor

from polyformer.attention.mechanisms import (
    AdaptiveSpanConfig,
    AlternateConfig,
    CopeConfig,
    DynamicSpanConfig,
    ForgettingConfig,
    MobaConfig,
    SoftmaxConfig,
    SVDConfig,
    TalkingHeadsConfig,
    TopBlocksConfig,
)
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns import Pattern, Window
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import FAMILIES, convert, from_transformers

LENGTH, LONGER = 12, 47
DENSE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [0, 1, 2]},
    "big_bird": {"attention_type": "original_full"},
    "gemma3_text": {"sliding_window": 40},
    "gpt_neo": {"window_size": 40},
    "lfm2": {"layer_types": ["full_attention"] * 3},
    "led": {"attention_window": [40, 40]},
    "longformer": {"attention_window": [40, 40]},
    "kimi_linear": {"layer_types": ["full_attention"] * 3},
    "mistral": {"sliding_window": 40},
    "nemotron_h": {"layers_block_type": ["full_attention", "mlp", "full_attention"]},
    "modernbert": {"local_attention": 80},
    **{name: {"sliding_window": 40} for name in ("cohere2", "exaone4", "olmo3")},
    "qwen2": {"sliding_window": 40},
    **{
        name: {"layer_types": ["full_attention", "full_attention"]}
        for name in ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
    },
    "reformer": {"attn_layers": ["local", "local"], "local_attn_chunk_length": 20},
}
"""Options with which a family sees all of a text, as what it is converted to does."""

COVERING: dict[str, MechanismConfig] = {
    "softmax": SoftmaxConfig(pattern=Window(LENGTH)),
    "adaptive_span": AdaptiveSpanConfig(max_span=200, initial=1.0),
    "cope": CopeConfig(),
    "dynamic_span": DynamicSpanConfig(max_span=200, initial=90.0),
    "forgetting": ForgettingConfig(gate_bias=90.0),
    "moba": MobaConfig(),
    "svd": SVDConfig(rank=LENGTH),
    "talking_heads": TalkingHeadsConfig(),
    "top_blocks": TopBlocksConfig(),
    "alternate": AlternateConfig(
        mechanisms=(SoftmaxConfig(pattern=Window(LENGTH)), AdaptiveSpanConfig(max_span=200, initial=1.0))
    ),
}
OTHERS = {
    "cosine": "its queries and keys have length 1",
    "differential": "its output is normalized",
    "linformer": "its projections are new",
    "lsh": "its keys are its queries",
    "memory_compressed": "its kernels are new",
    "nsa": "its gates are new",
    "performer": "its features are random",
    "rfa": "its features are random",
    "persistent": "its further keys are new",
    "routing": "its queries and keys have length 1",
    "selective": "its first head masks keys for all heads",
    "sinkhorn": "its sorting networks are new",
    "sort_cut": "its sorting networks are new",
    **dict.fromkeys(
        ("delta", "gated_convolution", "gated_delta", "gla", "kda", "linear", "retention", "rwkv7"),
        "it has no softmax",
    ),
    **dict.fromkeys(
        ("sigmoid", "ssd"),
        "it has no softmax",
    ),
}
"""Mechanisms that have no form in which they are dense attention of the same weights."""

PARTICULAR = ("falcon_h1", "gemma2", "gpt_oss", "mamba2")
"""Families without softmax attention alone, or with sinks or soft caps, which other mechanisms lack."""

PATTERNS = [
    "Window(12)",
    "Window(12) | Global(1)",
    "BlockWindow(8, 3) | Global(8) | Random(1, 8)",
    "Blockwise(12)",
    "Global(12)",
    "GlobalEnd(12) | Window(12)",
    "Strided(12) | Window(12)",
    "Fixed(12) | Window(12)",
    "Window(12) | Marked()",
    "PerLayer((Window(12), Full()))",
    "ETC(2, 12)",
    "Local1D(12, 12)",
]


def first(name: str) -> str:
    """The class that is converted."""
    return next(iter(FAMILIES[name].tasks))


@functools.cache
def source(name: str) -> Transformer:
    """A model in float64, whose weights are all away from their special initial values."""
    return from_transformers(tiny(name, first(name), **DENSE.get(name, {})).double())


def logits(model: Transformer, length: int = LENGTH) -> Tensor:
    ids = torch.randint(3, 23, (2, length), generator=torch.Generator().manual_seed(length))
    inputs = {"input_ids": ids}
    if model.encoder is not None and model.decoder is not None:
        inputs["decoder_input_ids"] = ids[:, :7]
    with torch.no_grad():
        return model(**inputs).logits


def converted(name: str, attention: Any, positions: int | None) -> None:
    old = source(name)
    new, report = convert(old, attention, max_positions=positions)
    checked(report, old, new)
    assert all(".mechanism." in item for item in report.newly_initialized)
    torch.testing.assert_close(logits(new), logits(old), rtol=1e-9, atol=1e-9)
    tolerance = 2e-4 * float(logits(old).abs().max())
    torch.testing.assert_close(logits(new.float()).double(), logits(old), rtol=0, atol=tolerance)
    if positions is not None:
        assert logits(new, LONGER).isfinite().all(), "the new positions are there"


def test_every_mechanism_covers_or_says_why_not():
    # Tests of the laboratory register members of their own in the same process.
    own = {name for name, kind in MechanismConfig.kinds.items() if kind.__module__.startswith("polyformer.")}
    assert {*COVERING, *OTHERS} == own


@pytest.mark.parametrize("name", [name for name in TEXTS if name not in PARTICULAR])
def test_what_covers_the_text_changes_nothing(name: str):
    """By every mechanism; half of them, others in every second family, with room for longer texts too."""
    longer = source(name).config.max_position_embeddings + 28
    for number, attention in enumerate((None, *COVERING.values())):
        positions = longer if (number + TEXTS.index(name)) % 2 else None
        if (refusal := refused(name, attention)) is None:
            converted(name, attention, positions)
        else:
            with pytest.raises(InputError, match=refusal):
                convert(source(name), attention, max_positions=positions)


def refused(name: str, attention: MechanismConfig | None) -> str | None:
    """What is said of a mechanism that a family cannot have; None where it can."""
    model = source(name)
    stack = model.encoder or model.decoder
    assert stack is not None
    if attention is None:
        return None
    if name.startswith(("deepseek", "glm_moe_dsa", "kimi_linear")) and attention.kind != "softmax":
        return "latent: expected the mechanism 'softmax'"
    if not attention.causal and model.encoder is None:
        return "cannot run in a decoder"
    if not attention.supports_score_bias and stack.position.adds_terms:
        return "cannot use a position scheme that changes the scores"
    if attention.kind == "alternate" and name == "albert":
        return "share"
    return None


@pytest.mark.parametrize("name", ["bert", "gpt_neo", "t5", "deberta-v2"])
def test_every_pattern_that_covers_the_text_changes_nothing(name: str):
    for pattern in map(Pattern.from_text, PATTERNS):
        if name == "gpt_neo" and not pattern.causal():
            with pytest.raises(InputError, match="decoder"):
                convert(source(name), pattern)
        else:
            converted(name, pattern, None)


@pytest.mark.parametrize("options", [{"max_relative_positions": -1}, {"max_relative_positions": 5}])
@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_what_deberta_tells_apart_stays(name: str, options: dict[str, Any]):
    """Each version with a table of positions of its own beside, and without."""
    for absolute in (True, False):
        theirs = tiny(name, "Model", position_biased_input=absolute, **options).double()
        old = from_transformers(theirs)
        new, report = convert(old, max_positions=LONGER)
        checked(report, old, new)
        assert not report.newly_initialized
        assert not report.left
        assert bool(report.extended) == absolute
        torch.testing.assert_close(logits(new), logits(old), rtol=1e-10, atol=1e-10)
        again, _ = convert(new, max_positions=2 * LONGER)
        torch.testing.assert_close(logits(again, LONGER), logits(new, LONGER), rtol=1e-10, atol=1e-10)


def test_a_longer_deberta_is_still_one(tmp_path: Any):
    """transformers reads it, and computes the same of texts that both can read."""
    theirs = tiny("deberta-v2", "Model")
    longer, _ = convert(from_transformers(theirs), max_positions=LONGER)
    longer.save_pretrained(tmp_path, format="hub")
    again = type(theirs).from_pretrained(tmp_path).eval()
    assert again.config.max_position_embeddings == LONGER
    ids = torch.randint(3, 23, (2, 19), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(again(ids).last_hidden_state, theirs(ids).last_hidden_state)


def test_scales_of_every_layer_are_kept():
    """GPT-2 can divide the scores of layer l by l, too, which one mechanism for all layers cannot say."""
    scales = {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
    old = from_transformers(tiny("gpt2", "LMHeadModel", n_layer=3, **scales).double())
    for attention in (Window(LENGTH), SoftmaxConfig(), COVERING["adaptive_span"]):
        new, report = convert(old, attention)
        checked(report, old, new)
        torch.testing.assert_close(logits(new), logits(old), rtol=1e-10, atol=1e-10)


def test_a_scale_that_is_asked_for_is_taken():
    old = source("t5")
    new, report = convert(old, SoftmaxConfig(scale=0.3))
    assert not report.scaled
    assert new.config.encoder is not None
    assert new.config.encoder.attention.mechanism == SoftmaxConfig(scale=0.3)


def test_positions_that_add_to_queries_cannot_be_scaled():
    theirs = tiny("deberta", "Model")
    old = from_transformers(theirs)
    model = Transformer(old.config.override("scale", 1.0))
    model.load_state_dict(old.state_dict())
    with pytest.raises(InputError, match="cannot have the model's scale"):
        convert(model, COVERING["adaptive_span"])
    new, _ = convert(model, Window(LENGTH))
    torch.testing.assert_close(logits(new), logits(model.eval()))


def test_positions_on_a_grid_grow_by_whole_rows():
    old = source("reformer")
    new, report = convert(old, max_positions=LONGER)
    assert new.config.decoder is not None
    assert new.config.decoder.position.to_dict()["grid"] == [8, 6]
    assert report.extended == ("decoder.position.tables.0.weight",)


@pytest.mark.parametrize(
    ("name", "kind"), [("decision_transformer", "TrajectoryTransformer"), ("vit", "VisionTransformer")]
)
def test_a_model_of_anything_but_texts_is_refused(name: str, kind: str):
    with pytest.raises(InputError, match=f"convert: expected a model of texts, got a {kind}"):
        convert(from_transformers(tiny(name, "Model")), Window(3))


def test_global_projections_go_where_no_token_is_global():
    old = source("longformer")
    for attention in (Window(LENGTH), COVERING["adaptive_span"]):
        new, report = convert(old, attention)
        checked(report, old, new)
        assert report.left
        assert all(".global_attention." in name for name in report.left)
        torch.testing.assert_close(logits(new), logits(old), rtol=1e-9, atol=1e-9)
