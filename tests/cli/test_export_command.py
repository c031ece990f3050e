"""`polyformer export`: the graph and the tokenizer of a checkpoint."""

from pathlib import Path

import pytest
import torch

from polyformer.cli.main import main
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.presets import create_model


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
