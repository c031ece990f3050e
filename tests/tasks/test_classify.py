"""Classification: labels, metrics, and a model that learns."""

import numpy as np
import pytest
import torch

from polyformer import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.model import Transformer
from polyformer.presets import model_config
from polyformer.tasks import Classification, ClassificationConfig, Fitting

WORDS = {"pos": ["good", "fine"], "neg": ["bad", "poor"]}
ROWS = [
    {"text": f"{word} {i % 3} film", "label": label}
    for label, words in WORDS.items()
    for word in words
    for i in range(5)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(
        TokenizerConfig(algorithm="wordpiece", vocab_size=60), (row["text"] for row in ROWS)
    )


def build(tokenizer: Tokenizer, **options: object) -> Classification:
    return ClassificationConfig(batch_tokens=512, max_length=8, **options).resolve(ROWS).build(tokenizer)  # type: ignore[arg-type]


def test_labels_are_those_of_the_training_data():
    config = ClassificationConfig().resolve(ROWS)
    assert config.labels == ("neg", "pos")
    assert ClassificationConfig().resolve([{"label": 1}, {"label": 0}]).labels == ("0", "1")
    assert config.resolve([{"label": "other"}]).labels == ("neg", "pos")
    with pytest.raises(InputError, match="every training text has the same one, 'a'; two or more are needed"):
        ClassificationConfig().resolve([{"label": "a"}])


def test_an_unseen_label_is_named(tokenizer: Tokenizer):
    with pytest.raises(InputError, match="label: 'meh' was not seen in training, which had 'neg', 'pos'"):
        build(tokenizer).held_out([{"text": "a film", "label": "meh"}])


def test_metrics_from_a_confusion_worked_by_hand(tokenizer: Tokenizer):
    # neg: 3 right, 1 taken for pos. pos: 2 right, 2 taken for neg.
    found = build(tokenizer).metrics([4.0, 3.0, 1.0, 2.0, 2.0], {})
    assert found["loss"] == 0.5
    assert found["accuracy"] == 5 / 8
    assert found["f1_macro"] == pytest.approx((2 * 3 / (4 + 5) + 2 * 2 / (4 + 3)) / 2)


def test_a_model_learns_and_says_its_labels(tokenizer: Tokenizer):
    task = build(tokenizer)
    fitting = Fitting(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny", {"dropout": 0.0})))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for epoch in range(25):
        for batch in fitting.batches(epoch, 0, 0, 1):
            optimizer.zero_grad()
            fitting.loss(model, batch).backward()
            optimizer.step()
    assert task.score(model.eval(), ROWS)["accuracy"] == 1
    shares = task.classify(model, ["good film", "a poor one", "fine"])
    assert [max(one, key=lambda label: one[label]) for one in shares] == ["pos", "neg", "pos"]
    assert all(sum(one.values()) == pytest.approx(1) for one in shares)


def test_token_dropout_hides_words_in_training_only(tokenizer: Tokenizer):
    task = build(tokenizer, token_dropout=0.5)
    fitting = Fitting(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
    assert fitting.valid is not None
    served = (fitting.batches(0, 0, 0, 1), (batch for _, batch in fitting.valid.batches.epoch(0)))
    shown = [np.concatenate([batch["input_ids"].flatten() for batch in batches]) for batches in served]
    hidden = [(ids == tokenizer.unk_id).sum() for ids in shown]
    assert hidden[0] > 0.3 * 3 * len(ROWS)
    assert hidden[1] == 0
    assert (shown[0] == tokenizer.cls_id).sum() == (shown[0] == tokenizer.sep_id).sum() == len(ROWS)


def test_long_texts_are_refused_or_cut(tokenizer: Tokenizer):
    text = "good " * 9
    with pytest.raises(InputError, match=r"text 1 \('good good.* has 11 tokens, more than task.max_length 8"):
        build(tokenizer).encode([text])
    (ids,) = build(tokenizer, too_long="cut").encode([text])
    assert len(ids) == 8
    assert ids[-1] == tokenizer.sep_id


def test_the_head_has_as_many_labels(tokenizer: Tokenizer):
    task = build(tokenizer, labels=("a", "b", "c"))
    assert Transformer(task.adapt(model_config("encoder-tiny"))).head.output.weight.shape[0] == 3
