"""`polyformer export`: the graph and the tokenizer of a checkpoint."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer.cli.main import main
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.presets import create_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_a_graph_and_a_tokenizer_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    tokenizer.save(model)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    create_model("decoder-tiny", vocab_size=len(tokenizer), **small).save_pretrained(model)
    assert main(["export", str(model), str(out), "--format", "torch"]) == 0
    assert "attention of layers 0: dense (the queries continue a cache)" in capsys.readouterr().out
    assert {"model.pt2", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    cache, ids = torch.zeros(1, 2, 0, 16), torch.tensor([[5, 6, 7]])
    logits, keys, _ = torch.export.load(out / "model.pt2").module()(ids, torch.ones_like(ids), cache, cache)
    assert (logits.shape[:2], keys.shape[2]) == ((1, 3), 3)


def test_a_translator_decodes_with_the_program_of_the_documentation(
    train_tiny: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime")
    run, out = train_tiny("translate"), tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert {"tokenizer.json", "decoder_with_past_model.onnx"} <= {file.name for file in out.iterdir()}
    loaded = polyformer.load(run, "cpu")
    special, described = loaded.model.config.special, json.loads((out / "config.json").read_text())
    assert described["is_encoder_decoder"]
    assert described["max_position_embeddings"] == loaded.model.config.max_position_embeddings
    tokens = [described[f"{name}_token_id"] for name in ("pad", "decoder_start", "eos")]
    assert tokens == [special.pad, special.bos, special.eos]
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == special.eos
    assert settings["num_beams"] == 4
    (program,) = re.findall(
        r"```python\n((?:(?!```).)*decoder_with_past_model.*?)```", PAGE.read_text(), re.S
    )
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(program, {})
    texts = ["A dog runs.", "Two men sit at a table."]
    rows = loaded.task.rows.encode(texts)
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=special.pad
    )
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True).long()
    expected = loaded.model.generate(ids, mask, max_new_tokens=50).texts(loaded.task.tokenizer.decode)
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
