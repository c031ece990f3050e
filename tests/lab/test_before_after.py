"""A model before and after a conversion, measured on one text."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from polyformer.cli.commands.before_after import (
    Comparison,
    compare,
    comparison_table,
    quality_losses,
    text_reader,
)
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert
from polyformer.models.presets import create_model

TEXT = "the cat sat on the mat and the dog lay by the door while it rained all day long " * 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=120), [TEXT])


def model_of(preset: str, tokenizer: Tokenizer, **options: Any) -> Transformer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": len(tokenizer), "max_position_embeddings": 24}
    model = create_model(preset, **sizes, **options).eval()
    for parameter in model.parameters():  # far from the start, where attention changes little
        torch.nn.init.normal_(parameter, std=0.8)
    return model


def results(before: Transformer, after: Transformer, tokenizer: Tokenizer, *lengths: int) -> list[Comparison]:
    return list(compare(before, after, tokenizer, tokenizer.encode(TEXT), lengths, tokens=48))


def test_perplexity_is_that_of_every_token_after_those_of_its_piece(tokenizer: Tokenizer):
    model = model_of("gpt2", tokenizer)
    (row,) = results(model, model, tokenizer, 16)
    ids = torch.tensor(tokenizer.encode(TEXT)[:49])
    nats = [
        -model(ids[None, start : start + 16])
        .logits[0]
        .log_softmax(-1)[range(16), ids[start + 1 : start + 17]]
        for start in (0, 16, 32)
    ]
    assert not isinstance(row.before, str)
    assert row.before.tokens == 48
    assert row.before.perplexity == pytest.approx(math.exp(float(torch.cat(nats).mean().detach())), rel=1e-5)


def test_masked_tokens_are_the_same_before_and_after(tokenizer: Tokenizer):
    model = model_of("bert-base", tokenizer, head="masked")
    same, _ = convert(model, "Window(24)")
    (row,) = results(model, same, tokenizer, 24)
    assert not isinstance(row.before, str)
    assert not isinstance(row.after, str)
    assert row.after.perplexity == pytest.approx(row.before.perplexity, rel=1e-5)
    assert quality_losses([row], 1e-4) == []
    piece = next(text_reader(model, tokenizer).pieces(tokenizer.encode(TEXT), 24, 1))
    masked = piece["input_ids"] == tokenizer.mask_id
    assert torch.equal(masked, piece["labels"] != -100)
    assert int(masked.sum()) == round(0.15 * 22)


def test_vectors_are_compared_by_their_angle(tokenizer: Tokenizer):
    model = model_of("bert-base", tokenizer, head="embed")
    narrow, _ = convert(model, "Window(1)")
    (row,) = results(model, narrow, tokenizer, 24)
    assert row.similarity is not None
    assert row.similarity < 0.99999
    pieces = list(text_reader(model, tokenizer).pieces(tokenizer.encode(TEXT), 24, 2))
    cosines = [F.cosine_similarity(model(**piece).logits, narrow(**piece).logits) for piece in pieces]
    assert row.similarity == pytest.approx(float(torch.cat(cosines).mean().detach()), abs=1e-6)
    assert "similarity of" in quality_losses([row], 0.0)[0]


def test_what_the_model_before_cannot_read_is_compared_with_the_longest_that_it_can(tokenizer: Tokenizer):
    model = model_of("gpt2", tokenizer)
    longer, _ = convert(model, max_positions=48)
    rows = results(model, longer, tokenizer, 24, 48)
    assert isinstance(rows[1].before, str)
    assert "24 learned" in rows[1].before
    assert not isinstance(rows[1].after, str)
    assert not isinstance(rows[0].before, str)
    ratio = rows[1].after.perplexity / rows[0].before.perplexity
    assert quality_losses(rows, ratio - 1 + 1e-6) == []
    assert quality_losses(rows, ratio - 1 - 1e-6)
    assert any(line.startswith("before, -: ") for line in comparison_table(rows))


def test_a_conversion_that_cannot_read_the_text_is_not_good(tokenizer: Tokenizer):
    model = model_of("bert-base", tokenizer, head="masked")
    linformer, _ = convert(model, "linformer(k=4, max_length=8)")
    assert quality_losses(results(model, linformer, tokenizer, 24), 10.0) == [
        "the new model cannot read 24 tokens"
    ]


def test_heads_and_texts_without_a_comparison_are_refused(tokenizer: Tokenizer):
    model = model_of("bert-base", tokenizer, head="classify")
    with pytest.raises(InputError, match=r"head 'classify' cannot be evaluated on plain text"):
        results(model, model, tokenizer, 16)
    model = model_of("gpt2", tokenizer)
    with pytest.raises(InputError, match="too few for a length of 100000"):
        results(model, model, tokenizer, 100_000)


def test_the_command_says_whether_the_conversion_is_good(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = model_of("gpt2", tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    (tmp_path / "text").write_text(TEXT)
    words = ["convert", str(tmp_path / "model"), "--evaluate", str(tmp_path / "text"), "--attention"]
    assert main([*words, "Window(24)", str(tmp_path / "same")]) == 0
    assert "quality kept: all changes are within --tolerance 0.05" in capsys.readouterr().out
    assert main([*words, "Window(1)", str(tmp_path / "narrow"), "--tolerance", "0"]) == 1
    assert "quality lost: perplexity at 24 tokens is" in capsys.readouterr().out
    assert (tmp_path / "narrow" / "model.safetensors").is_file()
    for bad in (["--lengths", "0"], ["--lengths", "a,b"], ["--tolerance=-1"], ["--tokens", "0"]):
        assert main([*words, "Window(1)", str(tmp_path / "refused"), *bad]) == 2
    assert main([*words[:2], "--evaluate", "absent", str(tmp_path / "refused")]) == 2
    assert not (tmp_path / "refused").exists()
