"""Next sentences and sentence order beside hidden tokens: rows, the model, metrics, and that it learns."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fitted import learned

from polyformer.data import MaskingConfig, Splits, Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.nn.heads import MaskedConfig, PretrainingConfig
from polyformer.training.tasks import NextSentenceConfig, SentenceOrderConfig, SentencePairs, TaskWithData
from polyformer.training.tasks.sentences import SentencePairsConfig

ROWS = [
    {"text": "a b c d e. f g h i j. k l m n o."},
    {"text": "p q r s t. u v w x y. z a b c d."},
    {"text": "b d f h j. l n p r t. v x z b d."},
]
CONFIGS = [NextSentenceConfig, SentenceOrderConfig]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(
        TokenizerConfig(algorithm="wordpiece", vocab_size=100), [row["text"] for row in ROWS]
    )


def build(kind: type[SentencePairsConfig], tokenizer: Tokenizer, **options) -> SentencePairs:
    task = kind(**{"row_length": 24, "batch_tokens": 96, **options}).build(tokenizer)
    assert isinstance(task, SentencePairs)
    return task


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows(kind: type[SentencePairsConfig], tokenizer: Tokenizer):
    task = build(kind, tokenizer, draws=20)
    rows = task.rows.prepare(ROWS)
    assert {row["sentence_labels"] for row in rows} == {0, 1}
    for row in rows:
        ids, types = row["input_ids"], row["token_type_ids"]
        assert ids[0] == task.rows.cls
        assert [i for i, token in enumerate(ids) if token == task.rows.sep] == [
            types.index(1) - 1,
            len(ids) - 1,
        ]
        assert len(ids) == len(types) <= 24
    texts = {task.tokenizer.decode(row["input_ids"][1:-1], keep_special=True) for row in rows}
    own = "a b c d e. [SEP] f g h i j." if kind is NextSentenceConfig else "k l m n o. [SEP] a b c d e."
    assert any(own in text for text in texts)


def test_next_sentences_cross_documents_and_orders_do_not(tokenizer: Tokenizer):
    for kind in CONFIGS:
        task = build(kind, tokenizer, draws=20, short_share=0.0)
        for row in task.rows.prepare(ROWS):
            cut = row["token_type_ids"].index(1)
            segments = [
                task.tokenizer.decode(ids) for ids in (row["input_ids"][:cut], row["input_ids"][cut:])
            ]
            first, second = (
                next(i for i, row in enumerate(ROWS) if part[:9] in row["text"]) for part in segments
            )
            assert (first != second) == (kind is NextSentenceConfig and row["sentence_labels"] == 1)


def test_pairs_are_drawn_once_and_masks_anew(tokenizer: Tokenizer):
    task = build(NextSentenceConfig, tokenizer)
    fitting = TaskWithData(task, Splits(ROWS, ROWS, None), seed=3)  # type: ignore[arg-type]

    def seen(epoch: int, name: str) -> list[bytes]:
        batches = fitting.batches(epoch, 0, 0, 1)
        if name == "labels":
            return sorted((row != -100).numpy().tobytes() for batch in batches for row in batch["labels"])
        return sorted(str(label.tolist()).encode() for batch in batches for label in batch["sentence_labels"])

    assert seen(0, "sentence_labels") == seen(1, "sentence_labels")
    assert seen(0, "labels") != seen(1, "labels")


def test_the_model_gets_token_types_and_both_heads(tokenizer: Tokenizer):
    task = build(NextSentenceConfig, tokenizer)
    config = task.adapt(model_config("encoder-tiny"))
    assert config.embedding.type_vocab_size == 2
    assert isinstance(config.head, PretrainingConfig)
    kept = PretrainingConfig(tokens=MaskedConfig(activation="relu"))
    larger = model_config("encoder-tiny", {"type_vocab_size": 3, "head": kept})
    assert task.adapt(larger).head == kept
    assert task.adapt(larger).embedding.type_vocab_size == 3


def test_metrics_are_those_of_both_parts(tokenizer: Tokenizer):
    task = build(SentenceOrderConfig, tokenizer, masking=MaskingConfig(share=0.5))
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny"))).eval()
    held = task.rows.held_out(ROWS)
    nats = tokens = telling = correct = pairs = 0.0
    for _, batch in held.batches.epoch(0):
        logits, sentence = model(**batch).predictions()
        nats += F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").item()
        tokens += (batch["labels"] != -100).sum().item()
        telling += F.cross_entropy(sentence, batch["sentence_labels"], reduction="sum").item()
        correct += (sentence.argmax(-1) == batch["sentence_labels"]).sum().item()
        pairs += len(sentence)
    measured = task.metrics.measure(model, held)
    assert measured["perplexity"] == pytest.approx(np.exp(nats / tokens), rel=1e-5)
    assert measured["sentence_loss"] == pytest.approx(telling / pairs, rel=1e-5)
    assert measured["sentence_accuracy"] == pytest.approx(correct / pairs)
    assert measured["loss"] == pytest.approx(nats / tokens + telling / pairs, rel=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_learns_tokens_and_the_relation_of_pairs(
    kind: type[SentencePairsConfig], tokenizer: Tokenizer
):
    task = build(kind, tokenizer, draws=2, masking=MaskingConfig(static_copies=1))
    before, after = learned(task, model_config("encoder-tiny"), ROWS, steps=120)
    assert before["sentence_loss"] > 0.6
    assert before["perplexity"] > 30
    assert after["sentence_loss"] < 0.3
    assert after["perplexity"] < 3


def test_by_default_albert_hides_runs_of_words():
    assert SentenceOrderConfig().masking == MaskingConfig(unit="word", longest=3)
    assert NextSentenceConfig().masking == MaskingConfig()
