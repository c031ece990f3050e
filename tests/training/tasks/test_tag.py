"""Tagging: entities, the place of labels, and metrics."""

import pytest
import torch

from polyformer import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import Tagging, TaggingConfig
from polyformer.training.tasks.tag import entities

ROWS = [
    {"tokens": ["Anna", "flew", "to", "New", "York"], "tags": ["B-PER", "O", "O", "B-LOC", "I-LOC"]},
    {"tokens": ["Oslo", "!"], "tags": ["B-LOC", "O"]},
]


@pytest.fixture(scope="module")
def task() -> Tagging:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return TaggingConfig(batch_tokens=256, max_length=64).resolve(ROWS).build(tokenizer)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-A I-A O", {("A", 1, 3)}),
        ("B-A B-A", {("A", 0, 1), ("A", 1, 2)}),
        ("I-A I-A O I-B", {("A", 0, 2), ("B", 3, 4)}),
        ("B-A I-B I-B", {("A", 0, 1), ("B", 1, 3)}),
        ("O O", set()),
        ("B-A", {("A", 0, 1)}),
        ("", set()),
    ],
)
def test_entities(tags: str, expected: set[tuple[str, int, int]]):
    assert entities(tags.split()) == expected


def test_labels_stand_on_the_first_piece_of_each_word(task: Tagging):
    row = task.rows.prepare(ROWS[1:])[0]
    pieces = [task.tokenizer.cls_id, *b"Oslo", *b" !", task.tokenizer.sep_id]
    assert row["input_ids"] == pieces
    labels = [task.labels[i] if i != -100 else None for i in row["labels"]]
    assert labels == [None, "B-LOC", None, None, None, "O", None, None]


def test_a_word_of_which_nothing_is_left_still_has_a_place(task: Tagging):
    ids, places = task.rows.encode(["a", "", "b"])
    assert len(places) == 3
    assert places[-1] < len(ids) - 1


def test_metrics_count_whole_entities(task: Tagging):
    metrics = task.metrics.values([2.0, 8.0, 6.0, 1.0, 2.0, 3.0], {})
    assert metrics == {
        "loss": 0.25,
        "accuracy": 0.75,
        "precision": 0.5,
        "recall": pytest.approx(1 / 3),
        "f1": 0.4,
    }
    assert task.metrics.values([0.0] * 6, {})["f1"] == 0


def test_the_metrics_are_those_of_the_predicted_tags(task: Tagging):
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny"))).eval()
    held = task.metrics.measure(model, task.rows.held_out(ROWS))
    tags = task.tag(model, [row["tokens"] for row in ROWS])
    right = sum(a == b for row, predicted in zip(ROWS, tags) for a, b in zip(row["tags"], predicted))
    assert [len(sequence) for sequence in tags] == [5, 2]
    assert held["accuracy"] == pytest.approx(right / 7)
    true, guessed = [
        [entities(sequence) for sequence in every] for every in ([row["tags"] for row in ROWS], tags)
    ]
    both = sum(len(a & b) for a, b in zip(true, guessed))
    assert held["recall"] == pytest.approx(both / 3)


def test_long_sentences_are_refused_or_dropped(task: Tagging):
    config = TaggingConfig(max_length=10).resolve(ROWS)
    with pytest.raises(InputError, match=r"sentence 1 \('Anna flew.*'drop'"):
        config.build(task.tokenizer).rows.prepare(ROWS)
    assert len(config.override("too_long", "drop").build(task.tokenizer).rows.prepare(ROWS)) == 1
