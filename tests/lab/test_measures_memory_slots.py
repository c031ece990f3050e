"""Attention to the slots of a compressive memory, and the texts that need it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from polyformer_lab.cells import Cell
from polyformer_lab.measures.long_texts import COMMON, own_letters


def run(folder: Path, memory: str) -> list[dict[str, Any]]:
    """Return the rows of a run of one step on the texts in `folder`."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    recipe = {
        "task": {"kind": "lm", "feed": "in_order", "row_length": 8, "batch_tokens": 32},
        "model": {"preset": "decoder-tiny", "position": "transformer_xl", "memory": memory, **sizes},
        "data": {"path": f"{folder}/train.jsonl", "validation": f"{folder}/validation.jsonl"},
        "tokenizer": {"algorithm": "characters", "vocab_size": 32},
        "training": {"steps": 1},
    }
    options = {"held_out": 60, "parts": 2, "segments": 3}
    return Cell((), 0, folder / memory[:4], recipe, "memory-slots", options).run()


def own(text: Iterable[str]) -> set[str]:
    return {*text} - {*COMMON}


def test_fresh_weights_attend_to_all_slots_alike(tmp_path: Path):
    own_letters(tmp_path, train=8, validation=2, length=80, own=3)
    lines = [json.loads(line)["text"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert {len(text) for text in lines} == {80}
    assert {len(own(text)) for text in lines} == {3}
    assert len(own("".join(lines))) > 8, "each text has other letters"
    score, *parts = run(tmp_path, "compressive(length=4, compressed_length=4, rate=2)")
    assert [row["part"] for row in parts] == [1, 2, 3, 4]
    # A query sees 8 or 9 slots and 4.5 tokens of its segment, in the mean: all about equally.
    mean_share = sum(1 / (slots + seen) for slots in (8, 9) for seen in range(1, 9)) / 16
    assert [row["weight"] for row in parts] == pytest.approx([mean_share] * 4, rel=0.1)
    assert [*run(tmp_path, "recurrent(length=4)")[0]] == [*score] == ["perplexity"]
