"""Long texts: perplexity in segments and in order, and attention to the slots of a memory."""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.data import Splits, Tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_pretrained
from polyformer.models.presets import create_model, model_config
from polyformer.nn.memory.base import set_length
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModellingConfig
from polyformer_lab.cells import Cell
from polyformer_lab.measures.long_texts import (
    COMMON,
    batches,
    in_order_by_store,
    own_letters,
    perplexity,
    segment_perplexity,
)


def tiny(position: str) -> Transformer:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 23}
    torch.manual_seed(0)
    config = model_config("decoder-tiny", {**sizes, "intermediate_size": 16, "position": position})
    return Transformer(dataclasses.replace(config, max_position_embeddings=8, initializer_range=0.5)).double()


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 5, 37, 50])
def test_segments_predict_every_token_once(length: int):
    """37 tokens, in segments that do not overlap but for the token they begin with."""
    model, ids = tiny("alibi").eval(), torch.randint(0, 23, (37,), generator=torch.Generator().manual_seed(1))
    nats, predicted = 0.0, 0
    for start in range(0, 36, length - 1):
        segment = ids[start : start + length]
        logits = model(input_ids=segment[None]).logits[0]
        for place in range(1, len(segment)):
            nats -= math.log(float(logits[place - 1].softmax(-1)[segment[place]]))
            predicted += 1
    assert predicted == 36
    assert segment_perplexity(model, ids, length) == pytest.approx(math.exp(nats / 36), rel=1e-9)


def test_batches_of_segments_hold_the_same_rows():
    ids = torch.randint(0, 23, (40,), generator=torch.Generator().manual_seed(1))
    single = [row for batch in batches(ids, 9, batch_tokens=1) for row in batch.tolist()]
    together = list(batches(ids, 9, batch_tokens=27))
    assert [batch.shape for batch in together] == [(3, 9), (1, 9), (1, 8)]
    assert [row for batch in together for row in batch.tolist()] == single


def test_learned_positions_end():
    model, ids = tiny("learned"), torch.arange(20)
    assert segment_perplexity(model, ids, 8) is not None
    assert segment_perplexity(model, ids, 9) is None


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
    return task.rows.documents(list(run.splits.validation or ()))


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
