"""T5's mixture on the command line: from a T5 as the hub has it, measured again, and used."""

from collections.abc import Callable
from pathlib import Path

import checkpoints
import yaml

from polyformer.cli.main import main
from polyformer.data.rows.noising import add_sentinels


def test_a_t5_goes_on_with_a_mixture(tmp_path: Path, output: Callable[..., str]):
    t5 = tmp_path / "t5"
    t5.mkdir()
    tokenizer = add_sentinels(checkpoints.piece_files(t5))
    tokenizer.save(t5)
    checkpoints.save(t5, "t5-small", tokenizer, head_size=8)
    (tmp_path / "mood.tsv").write_text("Anna flew\t1\nTom flew\t0\n" * 3)
    (tmp_path / "text.txt").write_text("\n".join(checkpoints.TEXT))
    mood = {"path": "mood.tsv", "validation": "mood.tsv", "header": ["source", "target"]}
    parts = {
        "mood": {"prefix": "film: ", "words": {"0": "Oslo", "1": "Paris"}, "data": mood},
        "spans": {"form": "spans", "data": {"path": "text.txt", "format": "lines"}},
    }
    task = {"kind": "text_to_text", "max_length": 16, "max_target": 8, "batch_tokens": 64, "parts": parts}
    recipe = tmp_path / "mixture.yaml"
    recipe.write_text(yaml.safe_dump({"task": {**task, "folder": str(tmp_path)}}))
    run = tmp_path / "run"
    command = ["train", str(recipe), "--pretrained", str(t5), "--out", str(run), "--steps", "2"]
    assert main([*command, "--device", "cpu"]) == 0
    table = output("evaluate", run)
    assert all(word in table for word in ("mood loss", "mood accuracy", "mood majority", "spans loss"))
    assert output("evaluate", run) == table
    assert len(output("translate", run, "film: Anna flew").splitlines()) == 1
