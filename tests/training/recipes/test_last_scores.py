"""What is measured of final weights: by all processes together, of a divided model while it is divided."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import torchrun
from polyformer.data import load
from polyformer.training.machine import rank
from polyformer.training.recipes import Recipe, Run, fit
from tiny_recipes import TEXT

PAIRS = "source\ttarget\n" + "".join(f"word {number}\tWort {number}\n" for number in range(12))
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "lm": {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64, "ngram_order": 0},
        "model": {"preset": "decoder-tiny", **SMALL},
    },
    "translate": {
        "task": {"kind": "translate", "max_length": 16, "batch_tokens": 64, "beam": {"num_beams": 2}},
        "model": {"preset": "transformer-tiny", **SMALL},
    },
}
PARALLEL = {"copies": {"data": 2}, "parts": {"shard": 2}}


def recipe(kind: str, data: Path, parallel: dict[str, int]) -> Recipe:
    return Recipe.from_dict(
        {
            **KINDS[kind],
            "data": {"path": str(data), "test": str(data), "validation_fraction": 0.25},
            "tokenizer": {"algorithm": "bytes"},
            "training": {"steps": 2, "engine": {"device": "cpu", "parallel": parallel}},
        }
    )


def test_they_are_those_of_the_saved_model(tmp_path: Path) -> None:
    (tmp_path / "lm.txt").write_text(TEXT)
    (tmp_path / "translate.tsv").write_text(PAIRS)
    ended = torchrun(__file__, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for kind in KINDS:
        for way in PARALLEL:
            run = Run.open(tmp_path / kind / way)
            known = run.facts["metrics"]
            splits = load(run.recipe.data, run.recipe.task.needs)
            for name, rows in {"validation": splits.validation, "test": splits.test}.items():
                alone = run.task.score(run.measured("cpu"), rows)
                assert alone.keys() == known[name].keys() >= {"loss"}
                assert known[name] == pytest.approx(alone, rel=1e-5)
        others = json.loads((tmp_path / kind / "scores-1.json").read_text())
        assert others["copies"] == json.loads((tmp_path / kind / "scores-0.json").read_text())["copies"]
        assert others["parts"] == {}, "the whole model is in the first process"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for data in (folder / "lm.txt", folder / "translate.tsv"):
        out = folder / data.stem
        scores = {way: fit(recipe(data.stem, data, mesh), out / way).scores for way, mesh in PARALLEL.items()}
        (out / f"scores-{rank()}.json").write_text(json.dumps(scores))
