"""Perplexity of a text that is read in order, against passes of the model over its parts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.data import Splits, Tokenizer
from polyformer.models.checkpoints import from_pretrained
from polyformer.models.presets import create_model
from polyformer.nn.memory.base import set_length
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModellingConfig
from polyformer_lab.cells import Cell
from polyformer_lab.measures.long_texts import in_order_by_store, perplexity

WORDS = [f"w{n}" for n in range(20)]


def fitted(memory: str) -> Fitted:
    """Return a run with fresh weights, a layer, segments of 4 and two held-out documents of 15 words."""
    tokenizer = Tokenizer.of_words([*WORDS, "<s>", "</s>"])
    task = LanguageModellingConfig(feed="in_order", row_length=4, batch_tokens=16).build(tokenizer)
    rows: Any = [{"text": " ".join(WORDS[(first + 7 * n) % 20] for n in range(15))} for first in (0, 3)]
    torch.manual_seed(0)
    options: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    options |= {"position": "transformer_xl", "memory": memory, "initializer_range": 0.5, "dropout": 0.0}
    model = create_model("decoder-tiny", **options, vocab_size=len(tokenizer))
    unused: Any = None
    return Fitted(unused, task, Splits(unused, rows, None), model.eval(), unused, {})


def nats(run: Fitted, ids: list[int], counted: int) -> float:
    """Return -ln P of the last `counted` ids, predicted from those before."""
    shares = run.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return -sum(float(shares[place - 1, ids[place]]) for place in range(len(ids) - counted, len(ids)))


def documents(run: Fitted) -> list[list[int]]:
    task: Any = run.task
    return task.documents(list(run.splits.validation or ()))


@torch.no_grad()
def test_a_memory_of_a_whole_document_reads_it_as_a_single_pass():
    run = fitted("recurrent(length=4)")
    first, second = documents(run)
    counts = len(first) - 1, len(second) - 1
    forgetful = perplexity(run, 1)
    set_length(run.model, 64)
    own, both = perplexity(run, len(first)), perplexity(run, len(first) + 1)
    assert own == pytest.approx(math.exp(nats(run, first, counts[0]) / counts[0]), rel=1e-5)
    total = nats(run, first, counts[0]) + nats(run, second, counts[1])
    assert both == pytest.approx(math.exp(total / sum(counts)), rel=1e-5)
    assert abs(forgetful - own) > 1e-3


@torch.no_grad()
def test_overlapping_rows_count_every_token_once():
    run = fitted("none")
    ids = documents(run)[0]
    total = nats(run, ids[:4], 3)
    for start in range(2, len(ids) - 2, 2):
        row = ids[start : start + 4]
        total += nats(run, row, len(row) - 2)
    assert perplexity(run, 1, overlap=2) == pytest.approx(math.exp(total / (len(ids) - 1)), rel=1e-5)


def test_a_store_that_is_added_changes_little_and_its_size_counts(tmp_path: Path):
    run = fitted("recurrent(length=4)")
    cell = Cell((), None, tmp_path, None, "in-order-by-store", {})
    vars(cell)["fitted"] = run
    plain = list(in_order_by_store(cell, 1, convert_to="memorizing(length=4, store=8, neighbours=2)"))
    assert plain == [{"store": 0, "perplexity": perplexity(run, 1)}]
    vars(cell)["fitted"] = dataclasses.replace(run, model=from_pretrained(tmp_path / "converted"))
    by_size = {row["store"]: row["perplexity"] for row in in_order_by_store(cell, 1, stores=(0, 2, 8))}
    assert list(by_size.values()) == pytest.approx([plain[0]["perplexity"]] * 3, rel=0.05)
    assert len({*by_size.values()}) == 3
