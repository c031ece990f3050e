"""SPALM's head with distances: its equation, and the distances that `add_distances` stores."""

from pathlib import Path

import numpy as np
import torch

from polyformer.applications.retrieval.neighbours import find
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.data.rows.neighbours import ROWS
from polyformer.nn.heads import HeadInput, HeadShape
from polyformer_lab.cells import Cell
from polyformer_lab.measures.nearest_neighbours import DISTANCE_STEPS, DistanceHeadConfig, files_of, rows_of

LINES = ["The house of number 4 stands in street 7 .", "A river runs in street 4 .", "The house stands ."]


def test_distances_are_subtracted_from_the_scores():
    torch.manual_seed(0)
    table, h = torch.randn(11, 4), torch.randn(2, 3, 4)
    tokens, steps = torch.randint(11, (2, 3, 5)), torch.randint(200, (2, 3, 5))
    tokens[..., 4] = steps[..., 4] = -1
    shape = HeadShape(hidden_size=4, vocab_size=11)
    inputs = HeadInput(h, None, table, neighbour_ids=torch.cat([tokens, steps], -1))
    for scale in (0.5, None):
        head = DistanceHeadConfig(scale=scale, factor=3.0).build(shape)
        torch.nn.init.zeros_(head.gate.weight)
        vectors = table[tokens[..., :4]]
        scores = (vectors @ h.unsqueeze(-1)).squeeze(-1) - (scale or 0.0) * steps[..., :4] / DISTANCE_STEPS
        pooled = 3 * (scores.softmax(-1).unsqueeze(-2) @ vectors).squeeze(-2)
        torch.testing.assert_close(head.states(inputs), (pooled + h) / 2)


def test_neighbours_have_the_distances_of_the_store(tmp_path: Path):
    for split in ("train", "validation"):
        rows = [f'{{"text": "{line} {split}"}}\n' for line in LINES]
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64},
        "model": {"preset": "decoder-tiny", **sizes},
        "data": {"path": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/validation.jsonl"},
        "tokenizer": {"algorithm": "bytes"},
        "training": {"steps": 1},
    }
    splits = ["train", "validation"]
    options = {"texts": str(tmp_path), "length": 8, "neighbours": 3, "splits": splits, "distances": True}
    cell = Cell((), 0, tmp_path / "frozen", recipe, "neighbours-of-texts", options)
    cell.run()
    reader, store, mean = open_reader(cell.folder, "cpu"), open_folder(cell.folder / "store"), 0.0
    for split in splits:
        file, tokens_only = f"{tmp_path}/{split}.jsonl", tmp_path / f"tokens-{split}"
        find(reader, rows_of(file), files_of(file), store, 3, tokens_only)
        tokens, steps = np.hsplit(
            np.fromfile(cell.folder / f"near-{split}" / ROWS, np.int32).reshape(-1, 6), 2
        )
        assert np.array_equal(tokens, np.fromfile(tokens_only / ROWS, np.int32).reshape(-1, 3))
        assert ((steps < 0) == (tokens < 0)).all()
        kept = steps[:-1]
        assert (np.diff(kept) >= 0).all(), "the nearest first"
        mean = mean or kept.mean()
    assert abs(mean - DISTANCE_STEPS) < 1, "a step is a fiftieth of the mean distance of the training text"
