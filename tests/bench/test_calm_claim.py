"""The claim about exits by confidence in sizes that prove nothing: it runs, goes on, and judges right."""

from pathlib import Path

import pytest
import torch

from polyformer.bench.reproduce.calm import CalmClaim, Measured, at, run, verdict
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.presets import create_model

SIZES = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}


def checkpoint(folder: Path, depth: str = "exits(rule=saturation)") -> str:
    torch.manual_seed(0)
    create_model("decoder-tiny", vocab_size=260, depth=depth, **SIZES).save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(folder)
    return str(folder)


def measured(layers: float, consistency: float) -> Measured:
    return Measured(layers, consistency, 0.1, 9.0, 1.0)


def test_the_claim_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 20)
    sizes = {"texts": 4, "prompt": 6, "new_tokens": 5, "out": str(tmp_path / "out")}
    config = CalmClaim(model=checkpoint(tmp_path / "model"), data=str(text), thresholds=(0.9, 0.0), **sizes)
    results = run(config)
    assert results["whole"].layers == 3
    assert results["whole"].consistency == 1.0
    assert results["threshold 0"].layers == results["all after layer 1"].layers == 1
    assert results["threshold 0"].perplexity == pytest.approx(results["all after layer 1"].perplexity)
    assert results["all after layer 2"].layers == 2
    assert (tmp_path / "out" / "calm.csv").is_file()
    assert (tmp_path / "out" / "calm.png").is_file()
    assert run(config) == results, "seconds too are those of the first call"
    assert "reproduced" in capsys.readouterr().out
    with pytest.raises(InputError, match="other settings"):
        run(CalmClaim(model=config.model, data=config.data, **{**sizes, "texts": 3}))


def test_the_verdict_compares_at_the_layers_of_fixed_exits():
    assert at([(10, 0.5), (20, 0.9)], 15) == pytest.approx(0.7)
    assert at([(10, 0.5), (20, 0.9)], 9) is None
    results = {"whole": measured(20, 1.0), "threshold 0.5": measured(10, 0.5)}
    assert verdict({**results, "all after layer 15": measured(15, 0.7)}).text.startswith("reproduced")
    assert verdict({**results, "all after layer 15": measured(15, 0.8)}).text.startswith("not")
    both = {"all after layer 12": measured(12, 0.7), "all after layer 15": measured(15, 0.7)}
    assert verdict({**results, **both}).text.startswith("not")
    assert verdict({**results, "all after layer 5": measured(5, 0.1)}).text.startswith("not")


def test_a_model_without_exits_and_a_short_text_are_refused(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("short")
    plain, exits = checkpoint(tmp_path / "plain", "fixed"), checkpoint(tmp_path / "exits")
    with pytest.raises(InputError, match="no early exits"):
        run(CalmClaim(model=plain, data=str(text)))
    with pytest.raises(InputError, match="data: expected 4096 tokens"):
        run(CalmClaim(model=exits, data=str(text)))
