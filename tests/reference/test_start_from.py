"""A new model that begins with a checkpoint's weights: every word of the report is true of the tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from reports import checked

import polyformer
from polyformer.attention.mechanisms import AdaptiveSpanConfig
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import fit_tables, start_from
from polyformer.models.presets import create_model, model_config
from polyformer.nn.heads import (
    ClassifyConfig,
    EmbedConfig,
    EnhancedMaskedConfig,
    HeadConfig,
    MaskedConfig,
    PretrainingConfig,
    TagConfig,
)
from polyformer.training.recipes.recipe import ModelChoice

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 24,
    "dropout": 0.0,
}
POOLER, OUTPUT = {"head.dense.weight", "head.dense.bias"}, {"head.output.weight", "head.output.bias"}
TRUNK_HEAD = EmbedConfig(pooling="first", hidden=True, normalize=False)


def shaken(preset: str, **options: Any) -> Transformer:
    """No two of its tensors are equal."""
    torch.manual_seed(0)
    model = create_model(preset, **{**SIZES, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def begun(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("format", ["hub", "polyformer"])
@pytest.mark.parametrize(
    ("old", "new", "fresh", "left"),
    [
        (TRUNK_HEAD, ClassifyConfig(num_labels=3), OUTPUT, set()),
        (TRUNK_HEAD, TagConfig(), OUTPUT, POOLER),
        (TRUNK_HEAD, EmbedConfig(), set(), POOLER),
        (
            MaskedConfig(),
            EnhancedMaskedConfig(max_position_embeddings=24),
            {"head.position.tables.0.weight"},
            set(),
        ),
    ],
    ids=["classify", "tag", "embed", "enhanced"],
)
def test_what_a_head_takes_over(
    tmp_path: Path, old: HeadConfig, new: HeadConfig, fresh: set[str], left: set[str], format: str
):
    """The same of transformers' files and of ours, by the names that the files have."""
    source = shaken("bert-base", head=old)
    source.save_pretrained(tmp_path, format=format)
    model = create_model("bert-base", **SIZES, head=new)
    before = begun(model)
    report = start_from(tmp_path, model)
    checked(report, source, model, before)
    assert set(report.newly_initialized) == fresh
    theirs = {name.replace("head.dense", "pooler.dense") for name in left}
    assert set(report.left) == (theirs if format == "hub" else left)


@pytest.mark.parametrize("format", ["hub", "polyformer"])
@pytest.mark.parametrize("head", [MaskedConfig(), ClassifyConfig()], ids=["masked", "classify"])
def test_of_two_pretraining_heads_each_goes_on(tmp_path: Path, head: HeadConfig, format: str):
    source = shaken("bert-base", head=PretrainingConfig(sentence=ClassifyConfig(dropout=0.0)))
    source.save_pretrained(tmp_path, format=format)
    model = create_model("bert-base", **SIZES, head=head)
    before = begun(model)
    report = start_from(tmp_path, model)
    checked(report, source, model, before)
    assert set(report.newly_initialized) == (OUTPUT if head.kind == "classify" else set())
    part = "sentence.dense.weight" if head.kind == "classify" else "tokens.dense.weight"
    assert torch.equal(model.get_parameter("head.dense.weight"), source.get_parameter(f"head.{part}"))
    assert any("predictions" in name or "tokens" in name for name in report.left) == (head.kind == "classify")


@pytest.mark.parametrize("format", ["hub", "polyformer"])
def test_robertas_classifier_is_no_pooler(tmp_path: Path, format: str):
    """It has a layer of its own, as in transformers, whichever files the model comes from."""
    pooled = EmbedConfig(pooling="first", hidden=True, normalize=False)
    shaken("roberta-base", head=pooled).save_pretrained(tmp_path, format=format)
    model = create_model("roberta-base", **SIZES, head=ClassifyConfig(drops_twice=True))
    assert set(start_from(tmp_path, model).newly_initialized) == OUTPUT | POOLER


@pytest.mark.parametrize(("rows", "fate"), [(24, "copied"), (40, "extended"), (16, "cut")])
def test_positions_are_copied_repeated_or_cut(tmp_path: Path, rows: int, fate: str):
    source = shaken("bert-base")
    source.save_pretrained(tmp_path)
    model = create_model("bert-base", **{**SIZES, "max_position_embeddings": rows})
    before = begun(model)
    report = start_from(tmp_path, model)
    checked(report, source, model, before)
    assert "encoder.position.tables.0.weight" in getattr(report, fate)
    assert f"{fate}: " in str(report)


def test_a_tasks_short_rows_do_not_cut_a_checkpoint():
    base = model_config("bert-base")
    for rows, kept in ((16, 512), (512, 512), (700, 700)):
        wanted = model_config("bert-base", {"max_position_embeddings": rows, "vocab_size": 40})
        actual = fit_tables(wanted, base)
        assert (actual.max_position_embeddings, actual.vocab_size) == (kept, base.vocab_size)


@torch.no_grad()
def test_other_attention_or_longer_texts_from_a_recipe_keep_the_numbers(tmp_path: Path):
    """The same as `convert`, by `model: {pretrained: .., attention: .., max_position_embeddings: ..}`."""
    ids = torch.randint(60, (2, 24), generator=torch.Generator().manual_seed(0))
    for preset, options in (
        ("gpt-neo-125m", {"attention": polyformer.Window(24)}),
        ("gpt-neo-125m", {"attention": AdaptiveSpanConfig(max_span=99, initial=1.0)}),
        ("deberta-base", {"max_position_embeddings": 50}),
        ("deberta-v3-base", {"max_position_embeddings": 300}),
    ):
        sizes = {"buckets": 4} if preset == "deberta-v3-base" else {}
        source = shaken(preset, **sizes)
        source.save_pretrained(tmp_path / preset)
        choice = ModelChoice(pretrained=str(tmp_path / preset), options=options)
        model = Transformer(choice.config()).eval()
        report = start_from(tmp_path / preset, model)
        torch.testing.assert_close(model(ids).logits, source(ids).logits, rtol=1e-4, atol=1e-5)
        assert all("mechanism" in name for name in report.newly_initialized)


@pytest.mark.parametrize(
    ("preset", "new", "dtype"),
    [
        ("gpt2", {"max_position_embeddings": 40}, torch.bfloat16),  # tied, longer, converted
        ("albert-base", {}, torch.float32),
        ("t5-small", {}, torch.float32),  # one table of positions for all layers
    ],
    ids=["longer", "shared", "positions"],
)
def test_a_model_without_values_takes_over_the_tensors(
    tmp_path: Path, preset: str, new: dict[str, Any], dtype: torch.dtype
):
    """It equals a model into which they are copied."""
    shaken(preset).to(dtype).save_pretrained(tmp_path)
    config = model_config(preset, {**SIZES, **new})
    copied = Transformer(config)
    with torch.device("meta"):
        taken = Transformer(config)
    assert start_from(tmp_path, copied) == start_from(tmp_path, taken)
    expected = copied.state_dict(keep_vars=True)
    actual = taken.state_dict(keep_vars=True)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name
        assert actual[name].requires_grad == tensor.requires_grad


def test_a_model_without_values_stays_so_if_a_tensor_is_missing(tmp_path: Path):
    shaken("bert-base", head=TRUNK_HEAD).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = create_model("bert-base", **SIZES, head=ClassifyConfig())
    assert set(start_from(tmp_path, model).newly_initialized) == OUTPUT
    assert all(parameter.is_meta for parameter in model.parameters())
