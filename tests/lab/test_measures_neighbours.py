"""Nearest neighbours: kNN-LM, in two domains, and SPALM with distances."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer import create_model
from polyformer.applications.retrieval.neighbours import find
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.data.rows.neighbours import ROWS
from polyformer.nn.heads import HeadInput, HeadShape
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell
from polyformer_lab.measures.nearest_neighbours import (
    DISTANCE_STEPS,
    DistanceHeadConfig,
    beginning,
    datastore,
    files_of,
    mixtures,
    own_log_p,
    perplexity,
    rows_of,
    targets,
    two_domains,
)
from polyformer_lab.measures.texts import articles

TEXT = "".join(f"{number} green bottles hang on the wall of house {number % 7}\n" for number in range(40))


def test_neighbours_in_a_repeated_text_lower_perplexity(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    torch.manual_seed(0)
    options = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
    create_model("decoder-tiny", num_hidden_layers=1, **options).save_pretrained(tmp_path / "model")
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(tmp_path / "model")
    for name, text in {"train": TEXT * 2, "valid": TEXT[200:700], "test": TEXT[900:1500]}.items():
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    sources = {"model": str(tmp_path / "model"), "text": str(tmp_path)}
    datastore(tmp_path, **sources, characters=1500, length=32)
    assert "an index needs" in capsys.readouterr().out, "for so few entries there is none"
    settings = {**sources, "store": str(tmp_path / "store"), "tokens": 256, "neighbours": [2, 8]}
    half, whole = (
        Cell((), None, tmp_path / f"{share}", None, "nearest-neighbours", {**settings, "share": share}).run()
        for share in (0.5, 1)
    )
    test, *rows = whole
    assert test["test.flat"] < test["test.none"] / 2
    assert [row["neighbours"] for row in rows] == [row["neighbours"] for row in half] == [2, 8]
    assert rows[0]["entries"] >= 1500
    assert half[0]["entries"] == rows[0]["entries"] // 2


def test_the_beginning_of_a_text_ends_with_a_line():
    assert "".join(beginning(iter(["ab\n", "cd\nef\ngh\n"]), 5)) == "ab\ncd\n"
    assert "".join(beginning(iter(["ab\n"]), 5)) == "ab\n"


ARTICLE = (
    " = Article {0} = \n \n The house of number {0} stands in street {1} . \n A river runs there . \n \n"
)


def test_runs_are_mixed_with_the_neighbours_of_the_same_tokens(tmp_path: Path):
    for name, count in (("train", 12), ("valid", 4), ("test", 4)):
        text = "".join(ARTICLE.format(number, number % 3) for number in range(count))
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    articles(tmp_path, str(tmp_path), characters=10 * len(ARTICLE), held_out=2 * len(ARTICLE))
    texts = [json.loads(line)["text"] for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert texts == [ARTICLE.format(number, number % 3) for number in range(3)], "in whole articles"
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64},
        "model": {"preset": "decoder-tiny", "position": "transformer_xl", **sizes},
        "data": {"path": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/validation.jsonl"},
        "tokenizer": {"algorithm": "bpe", "vocab_size": 280},
        "training": {"steps": 1},
    }
    options = {"texts": str(tmp_path), "length": 8, "neighbours": 2}
    frozen = Cell((), 0, tmp_path / "frozen", recipe, "neighbours-of-texts", options)
    (row,) = frozen.run()
    in_order = {
        **recipe,
        "task": {**recipe["task"], "feed": "in_order"},
        "model": {**recipe["model"], "memory": "recurrent(length=16)"},
    }
    alone = Cell((), 0, tmp_path / "alone", in_order, "mixtures", {})
    task = alone.fitted.task
    assert isinstance(task, LanguageModelling)
    log_p = own_log_p(alone.fitted, f"{tmp_path}/test.jsonl")
    assert len(log_p) == sum(len(ids) - 1 for ids in task.rows.documents([{"text": text} for text in texts]))
    near = targets(tmp_path / "frozen", log_p, f"{tmp_path}/test.jsonl", (2, row["entries"]), None)
    assert near.shares.shape[:2] == (len(log_p), 2)
    assert exp(float(near.losses(0.0)[0, 0])) == pytest.approx(perplexity(log_p))
    assert near.best()[1] < float(near.losses(0.0)[0, 0]), "the articles are nearly alike"
    own, with_two = mixtures(alone, str(tmp_path), str(tmp_path / "frozen"), [2])
    assert own["perplexity"] == pytest.approx(perplexity(log_p))
    assert with_two["perplexity"] < own["perplexity"]


DOMAIN_ARTICLE = " = Article {0} = \n \n The house of number {0} stands in street {1} . \n \n"
VERSE = "A green bottle hangs on wall {0}, and if it falls, {0} others do too.\n"


def test_each_domain_has_a_store_of_its_own_text(tmp_path: Path):
    for name in ("train", "valid", "test"):
        text = "".join(DOMAIN_ARTICLE.format(number, number % 3) for number in range(12))
        (tmp_path / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    book = tmp_path / "book.txt"
    book.write_text("".join(VERSE.format(number % 5) for number in range(400)))
    two_domains(tmp_path, str(tmp_path), str(book), characters=3000, held_out=300)
    train, validation = (
        "".join(rows_of(f"{tmp_path}/other/{split}.jsonl")) for split in ("train", "validation")
    )
    whole = book.read_text()
    assert whole.startswith(train)
    assert 3000 <= len(train) < 3000 + len(VERSE)
    assert 300 <= len(validation) < 300 + len(VERSE)
    assert whole.find(validation, len(whole) * 19 // 20 - len(VERSE)) > 0, (
        "the beginning of the held-out part"
    )
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    recipe = {
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 64},
        "model": {"preset": "decoder-tiny", **sizes},
        "data": {"path": f"{tmp_path}/train.jsonl", "validation": f"{tmp_path}/validation.jsonl"},
        "tokenizer": {"algorithm": "bpe", "vocab_size": 280},
        "training": {"steps": 1},
    }
    options = {"texts": str(tmp_path), "length": 16, "neighbours": 4, "tokens": 128}
    own, other = Cell((), 0, tmp_path / "run", recipe, "domain-weights", options).run()
    assert (own["domain"], other["domain"]) == ("own", "other")
    assert other["entries"] > own["entries"] > 0
    for row in (own, other):
        assert row["perplexity"] < row["none"] / 2, "the texts repeat themselves"
        assert row["weight"] > 0.5


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
