"""A checkpoint with another attention: what stays the same, what is copied, extended and fresh."""

from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer
from polyformer.attention.mechanisms import LinformerConfig, PerformerConfig, SoftmaxConfig
from polyformer.attention.patterns import ETC, BlockWindow, Global, Marked, Random, Window
from polyformer.attention.positions.rope import RopeConfig
from polyformer.attention.positions.rope_extensions import YarnConfig
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer, load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert
from polyformer.models.presets import create_model

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 60,
    "max_position_embeddings": 24,
    "dropout": 0.0,
}
LONGFORMER = Window(24) | Marked()
BIGBIRD = BlockWindow(8, 3) | Global(8) | Random(8, 1)


def dense(preset: str) -> Transformer:
    torch.manual_seed(0)
    return create_model(preset, **SIZES).double().eval()


def batch(model: Transformer, length: int = 24) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    actual = {"input_ids": torch.randint(60, (2, length))}
    if model.encoder is not None and model.decoder is not None:
        actual["decoder_input_ids"] = torch.randint(60, (2, 7))
    return actual


@pytest.mark.parametrize("preset", ["bert-base", "gpt2", "transformer-base"])
@pytest.mark.parametrize(
    "attention", [LONGFORMER, Window(24) | Global(1), BIGBIRD], ids=["longformer", "window", "bigbird"]
)
def test_a_pattern_that_covers_the_text_changes_nothing(preset: str, attention):
    old = dense(preset)
    new, report = convert(old, attention, max_positions=50)
    assert not report.newly_initialized
    assert not report.left
    inputs = batch(old)
    torch.testing.assert_close(new(**inputs).logits, old(**inputs).logits, rtol=1e-10, atol=1e-10)
    assert new(**batch(old, 50)).logits.isfinite().all()


def test_positions_are_repeated_and_the_rows_of_no_position_are_not():
    model = create_model("bert-base", **SIZES, position={"kind": "learned", "offset": 2})
    old = model.get_parameter("encoder.position.tables.0.weight")
    new, report = convert(model, Window(4), max_positions=60)
    table = new.get_parameter("encoder.position.tables.0.weight")
    assert report.extended == ("encoder.position.tables.0.weight",)
    assert table.shape == (62, 16)
    for position in (0, 23, 24, 47, 48, 59):
        assert torch.equal(table[2 + position], old[2 + position % 24])
    assert torch.equal(table[:2], old[:2])


def test_global_projections_begin_as_the_ordinary_ones():
    """So the model computes as before, though by more matrices."""
    old = dense("bert-base")
    new, report = convert(old, LONGFORMER, global_projections=True)
    assert not report.newly_initialized
    assert "encoder.layers.1.attention.global_attention.query.weight" in report.copied
    inputs = batch(old)
    marks = torch.zeros_like(inputs["input_ids"])
    marks[:, :2] = 1
    actual = new(**inputs, global_attention_mask=marks).logits
    torch.testing.assert_close(actual, old(**inputs).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("attention", "fresh"),
    [(LinformerConfig(k=6, max_length=24), True), (PerformerConfig(features=8), True), (ETC(2, 3), False)],
    ids=["linformer", "performer", "etc"],
)
def test_other_mechanisms_say_what_is_fresh(attention, fresh: bool):
    old = dense("bert-base")
    new, report = convert(old, attention)
    again, _ = convert(old, attention)
    assert bool(report.newly_initialized) == fresh
    assert all(".mechanism." in name for name in report.newly_initialized)
    assert {"tokens.weight", "encoder.layers.0.attention.query.weight"} <= set(report.copied)
    inputs = batch(old)
    assert torch.equal(new(**inputs).logits, again(**inputs).logits)
    assert old.state_dict().keys() - set(report.left) <= new.state_dict().keys()


def test_what_a_model_cannot_have_is_refused():
    with pytest.raises(InputError, match="cannot run in a decoder"):
        convert(dense("gpt2"), LinformerConfig(k=6, max_length=24))
    with pytest.raises(InputError, match="max_positions: expected at least the 24"):
        convert(dense("bert-base"), Window(4), max_positions=10)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A BERT with its tokenizer, as transformers would have saved them."""
    texts = [f"line {i} of a small text" for i in range(60)]
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), texts)
    assert len(tokenizer) <= 60
    dense("bert-base").float().save_pretrained(tmp_path / "bert", format="hub")
    tokenizer.save(tmp_path / "bert")
    return tmp_path / "bert"


def test_the_command_converts_and_training_goes_on(hub: Path, tmp_path: Path, capsys):
    out, run = tmp_path / "long", tmp_path / "run"
    command = ["convert", str(hub), str(out), "--attention", "Window(4) | Global(1)", "--max-positions", "48"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "extended: encoder.position.tables.0.weight" in said
    assert "newly initialized: none" in said
    model = polyformer.from_pretrained(out)
    assert model.config.max_position_embeddings == 48
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small text\n" for i in range(60)))
    named = {
        "--task.kind": "mlm",
        "--task.row_length": 40,
        "--pretrained": out,
        "--steps": 2,
        "--data": tmp_path / "text.txt",
        "--device": "cpu",
        "--out": run,
    }
    assert main(["train", *(str(word) for pair in named.items() for word in pair)]) == 0
    assert "copied" in capsys.readouterr().out
    trained = polyformer.from_pretrained(run)
    assert trained.config.vocab_size == 60
    assert trained.config.max_position_embeddings == 48, "shorter rows do not cut the table"
    assert trained.config.encoder == model.config.encoder


def test_the_command_goes_to_the_other_format_and_back(hub: Path, tmp_path: Path):
    assert main(["convert", str(hub), str(tmp_path / "own")]) == 0
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "back"), "--format", "hub"]) == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
    assert load_tokenizer(tmp_path / "back").encode("line 7") == load_tokenizer(hub).encode("line 7")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["nowhere", "out"], "no such directory"),
        (["{hub}", "{hub}"], "not empty"),
        (["{hub}", "out", "--attention", "Windoe(3)"], "Windoe"),
        (["{hub}", "out", "--attention", "linformer(k=)"], "linformer(k=)"),
        (["{hub}", "out", "--max-positions", "3"], "max_positions"),
        (["{hub}", "out", "--attention", "Window(3)", "--format", "hub"], "no public family"),
    ],
)
def test_bad_input_is_one_line(hub: Path, tmp_path: Path, changed: list[str], said: str, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *(word.replace("{hub}", str(hub)) for word in changed)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_decoder_that_takes_a_memory_of_keys_stays_what_it_was(tmp_path: Path):
    """Its gates are nearly closed; what had a family has none. Saved and loaded it is the same."""
    old = create_model("decoder-tiny", **SIZES, position="rope").double().eval()
    new, report = convert(old, memory="memorizing(length=4, store=9, neighbours=3)")
    assert report.newly_initialized == ("decoder.memory.gate", "decoder.memory.temperature")
    ids = batch(old, 20)["input_ids"]
    plain, _ = convert(old, memory="recurrent(length=4)")
    for model in (new, convert(plain, memory="memorizing(length=4, store=9)")[0]):
        assert float((10 * model.decoder.memory.gate.detach()).sigmoid().max()) < 0.02
    state, same_state, ends = new.new_state(), plain.new_state(), []
    with torch.no_grad():
        for part in ids.split(4, 1):
            ours, expected = new(part, state=state), plain(part, state=same_state)
            state, same_state = ours.state, expected.state
            ends.append((ours.logits - expected.logits).abs().max() / expected.logits.abs().max())
        torch.testing.assert_close(new(ids).logits, old(ids).logits, rtol=1e-12, atol=1e-12)
    assert ends[0] == ends[1] == 0, "there is nothing to look up yet"
    assert 0 < max(ends[2:]) < 0.05
    new.save_pretrained(tmp_path / "out")
    again = polyformer.from_pretrained(tmp_path / "out").double()
    for name, tensor in new.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-6, atol=1e-6)
    assert again.decoder.memory.size == 9
    with pytest.raises(InputError, match="memory: only a decoder-only model reads a text in segments"):
        convert(dense("bert-base"), memory="memorizing")
    with pytest.raises(InputError, match="Learned positions end after 24 tokens"):
        convert(dense("gpt2"), memory="memorizing")


def test_rotary_positions_are_extended_by_as_much_as_there_are_more():
    old = create_model("decoder-tiny", **SIZES, position="rope(base=500.0)").eval()
    new, report = convert(old, max_positions=96, extension="yarn")
    assert new.config.decoder is not None
    assert new.config.decoder.position.to_dict() == {
        **RopeConfig(base=500.0).to_dict(),
        "kind": "rope",
        "extension": YarnConfig(factor=4.0, original_max_positions=24).to_dict(),
    }
    assert not report.newly_initialized
    by_hand = convert(old, max_positions=96, extension=YarnConfig(factor=4.0, original_max_positions=24))[0]
    other = convert(old, max_positions=96, extension="yarn(factor=2)")[0]
    inputs = batch(old, 96)
    assert torch.equal(new(**inputs).logits, by_hand(**inputs).logits)
    assert not torch.allclose(new(**inputs).logits, other(**inputs).logits)


@pytest.mark.parametrize(
    ("position", "options", "said"),
    [
        ("learned", {"extension": "yarn", "max_positions": 96}, "only rotary positions"),
        ("rope", {"extension": "yarn"}, "its factor is 1"),
        ("rope", {"extension": "yarrn(factor=2)"}, "yarn"),
    ],
)
def test_extensions_that_cannot_be_are_refused(position: str, options: dict[str, Any], said: str):
    with pytest.raises(InputError, match=said):
        convert(create_model("decoder-tiny", **SIZES, position=position), **options)


def test_another_softmax_attention_keeps_the_soft_cap_and_the_sinks():
    options = {**SIZES, "attention": SoftmaxConfig(soft_cap=0.1, sink=True)}
    old = create_model("gpt2", **options).double().eval()
    torch.nn.init.normal_(old.get_parameter("decoder.layers.0.attention.mechanism.sink"), mean=2.0)
    new, report = convert(old, SoftmaxConfig(pattern=Window(24)))
    assert not report.newly_initialized
    inputs = batch(old)
    torch.testing.assert_close(new(**inputs).logits, old(**inputs).logits, rtol=1e-10, atol=1e-10)


def test_an_attention_without_the_soft_cap_warns():
    model = create_model("gpt2", **{**SIZES, "attention": SoftmaxConfig(soft_cap=0.1, sink=True)})
    with pytest.warns(UserWarning, match="'linear' has no soft cap, so the model loses its soft_cap=0.1"):
        _, report = convert(model, "linear")
    assert any(name.endswith("sink") for name in report.left)
