"""Masked language modelling: what is hidden when, and what is measured."""

from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer import InputError
from polyformer.data import MaskingConfig, Splits, Tokenizer, TokenizerConfig
from polyformer.data.tokenizers import load_tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe, fit
from polyformer.training.tasks import MaskedModelling, MaskedModellingConfig, TaskWithData

ROWS = [{"text": "some text to hide a part of"}, {"text": "and a second one, longer than a row of tokens is"}]


@pytest.fixture(scope="module")
def task() -> MaskedModelling:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return MaskedModellingConfig(row_length=32, batch_tokens=96, masking=MaskingConfig(share=0.25)).build(
        tokenizer
    )


def test_labels_are_what_was_hidden(task: MaskedModelling):
    plain = {tuple(row["input_ids"].tolist()) for row in task.rows.prepare(ROWS)}
    for _, batch in task.rows.held_out(ROWS).batches.epoch(0):
        hidden = batch["labels"] != -100
        restored = torch.where(hidden, batch["labels"], batch["input_ids"])
        assert {tuple(row) for row in restored.tolist()} <= plain
        assert 0 < hidden.sum() < hidden.numel() / 2


def test_training_hides_anew_and_evaluation_does_not(task: MaskedModelling):
    fitting = TaskWithData(task, Splits(ROWS, ROWS, None), seed=3)  # type: ignore[arg-type]

    def hidden(batches) -> list[np.ndarray]:
        return sorted((row != -100).numpy().tobytes() for batch in batches for row in batch["labels"])

    assert hidden(fitting.batches(0, 0, 0, 1)) == hidden(fitting.batches(0, 0, 0, 1))
    assert hidden(fitting.batches(0, 0, 0, 1)) != hidden(fitting.batches(1, 0, 0, 1))
    assert fitting.valid is not None
    twice = [[batch for _, batch in fitting.valid.batches.epoch(epoch)] for epoch in (0, 1)]
    assert hidden(twice[0]) == hidden(twice[1])


def test_metrics(task: MaskedModelling):
    metrics = task.metrics.values([3.0, 2.0, 4.0], {})
    assert metrics == {"loss": 0.75, "perplexity": pytest.approx(2.117), "accuracy": 0.5}
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny"))).eval()
    measured = task.metrics.measure(model, task.rows.held_out(ROWS))
    assert measured["loss"] == pytest.approx(np.log(260), rel=0.1)  # untrained: about uniform
    assert 0 <= measured["accuracy"] <= 1


def test_a_tokenizer_without_mask_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(InputError, match="it has no <mask> token, which this task needs"):
        MaskedModellingConfig().build(load_tokenizer(tmp_path))


def test_static_masks_are_copies_in_training_alone(task: MaskedModelling):
    config = MaskedModellingConfig(row_length=32, batch_tokens=96, masking=MaskingConfig(static_copies=10))
    static = config.build(task.tokenizer)
    fitting = TaskWithData(static, Splits(ROWS, ROWS, None), seed=3)  # type: ignore[arg-type]
    plain = len(task.rows.prepare(ROWS))
    seen = [
        [row.tobytes() for batch in fitting.batches(epoch, 0, 0, 1) for row in batch["labels"].numpy()]
        for epoch in (0, 1)
    ]
    assert len(seen[0]) == 10 * plain
    assert sorted(seen[0]) == sorted(seen[1])
    assert len(set(seen[0])) > 5 * plain
    assert fitting.valid is not None
    assert len(fitting.valid.batches.rows) == plain


def test_documents_can_have_rows_of_their_own():
    """For attention that cannot keep packed documents apart: no row has two, and nothing is lost."""
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    config = MaskedModellingConfig(row_length=8, batch_tokens=96, packed=False)
    own = config.build(tokenizer)
    rows = own.rows.prepare([{"text": "abcdefghij"}, {"text": "k"}])
    assert [len(row["input_ids"]) for row in rows] == [8, 4, 3]
    assert all(row.keys() == {"input_ids"} for row in rows)
    joined = np.concatenate([row["input_ids"] for row in rows[:2]])
    assert (joined[0], joined[-1]) == (own.rows.cls, own.rows.sep)
    assert tokenizer.decode(joined[1:-1].tolist()) == "abcdefghij"
    batch = own.rows.collate(rows)
    assert batch["attention_mask"].sum(1).tolist() == [8, 4, 3]
    assert "document_ids" not in batch


@pytest.mark.parametrize("kind", ["mlm", "electra"])
def test_attention_that_cannot_keep_packed_documents_apart_is_refused_before_a_run_begins(
    kind: str, tmp_path: Path
):
    (tmp_path / "text.txt").write_text("a few words to read and to hide again\n" * 9)
    settings = {
        "task": {"kind": kind, "row_length": 32, "batch_tokens": 64},
        "model": {"preset": "encoder-tiny", "attention": "linformer(max_length=32, k=4)"},
        "data": {"path": str(tmp_path / "text.txt")},
        "tokenizer": {"algorithm": "bytes"},
    }
    with pytest.raises(
        InputError,
        match=r"'linformer' cannot separate documents that are packed in one row.*--task.packed false",
    ):
        fit(Recipe.from_dict(settings), tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.*"))
    settings["task"]["packed"] = False
    task = Recipe.from_dict(settings).task.build(Tokenizer.train(TokenizerConfig(algorithm="bytes"), []))
    assert task.adapt(Recipe.from_dict(settings).model_config()).encoder is not None
