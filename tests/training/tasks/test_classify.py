"""Classification: labels, metrics, and a model that learns."""

import numpy as np
import pytest
import torch
from fitted import learned

from polyformer import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import (
    Classification,
    ClassificationConfig,
    PairClassification,
    PairClassificationConfig,
    TaskWithData,
)

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


def test_labels_that_differ_only_in_case_are_asked_about():
    rows = [*ROWS, {"text": "so fine", "label": "POS"}]
    with pytest.raises(
        InputError, match=r"^labels: 'POS' and 'pos' differ only in upper and lower case; .*task\.l"
    ):
        ClassificationConfig().resolve(rows)
    stated = ClassificationConfig(labels=("POS", "neg", "pos"))
    assert stated.resolve(rows) == stated


def test_labels_are_those_of_the_training_data():
    config = ClassificationConfig().resolve(ROWS)
    assert config.labels == ("neg", "pos")
    assert ClassificationConfig().resolve([{"label": 1}, {"label": 0}]).labels == ("0", "1")
    assert config.resolve([{"label": "other"}]).labels == ("neg", "pos")
    with pytest.raises(InputError, match="every training text has the same one, 'a'; two or more are needed"):
        ClassificationConfig().resolve([{"label": "a"}])


def test_metrics_from_a_confusion_worked_by_hand(tokenizer: Tokenizer):
    # neg: 3 right, 1 taken for pos. pos: 2 right, 2 taken for neg.
    metrics = build(tokenizer).metrics.values([4.0, 3.0, 1.0, 2.0, 2.0], {})
    assert metrics["loss"] == 0.5
    assert metrics["accuracy"] == 5 / 8
    assert metrics["f1_macro"] == pytest.approx((2 * 3 / (4 + 5) + 2 * 2 / (4 + 3)) / 2)


def test_a_model_learns_and_says_its_labels(tokenizer: Tokenizer):
    task = build(tokenizer)
    fitting = TaskWithData(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
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
    assert [max(scores, key=lambda label: scores[label]) for scores in shares] == ["pos", "neg", "pos"]
    assert all(sum(scores.values()) == pytest.approx(1) for scores in shares)


def test_token_dropout_hides_words_in_training_only(tokenizer: Tokenizer):
    task = build(tokenizer, token_dropout=0.5)
    fitting = TaskWithData(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
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
        build(tokenizer).rows.encode([text])
    (ids,) = build(tokenizer, too_long="cut").rows.encode([text])
    assert len(ids) == 8
    assert ids[-1] == tokenizer.sep_id


def test_the_head_has_as_many_labels(tokenizer: Tokenizer):
    task = build(tokenizer, labels=("a", "b", "c"))
    assert Transformer(task.adapt(model_config("encoder-tiny"))).head.output.weight.shape[0] == 3


PAIRS = [
    {"text": f"{a} {i % 3} film", "pair": f"{b} film", "label": "same" if words is others else "other"}
    for words in WORDS.values()
    for others in WORDS.values()
    for a in words
    for b in others
    for i in range(2)
]


def pairs(tokenizer: Tokenizer, **options: object) -> PairClassification:
    config = PairClassificationConfig(batch_tokens=512, **{"max_length": 10, **options})  # type: ignore[arg-type]
    task = config.resolve(PAIRS).build(tokenizer)
    assert isinstance(task, PairClassification)
    return task


def test_two_texts_stand_in_one_row_with_types(tokenizer: Tokenizer):
    (row,) = pairs(tokenizer).rows.inputs([{"text": "good film", "pair": "bad"}])
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    text, pair = tokenizer.encode_batch(["good film", "bad"])
    assert row["input_ids"] == [cls, *text, sep, *pair, sep]
    assert row["token_type_ids"] == [0] * (len(text) + 2) + [1] * (len(pair) + 1)


@pytest.mark.parametrize(
    ("template", "between", "typed"),
    [("[CLS] $A [SEP] $B:1 [SEP]:1", 1, True), ("[CLS] $A [SEP] [SEP] $B [SEP]", 2, False)],
)
def test_a_checkpoints_tokenizer_says_how_two_are_joined(
    tokenizer: Tokenizer, template: str, between: int, typed: bool
):
    from tokenizers import processors

    theirs = Tokenizer(type(tokenizer.backend).from_str(tokenizer.backend.to_str()))
    names = [(name, theirs.backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    theirs.backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=template, special_tokens=names
    )
    task = pairs(theirs, max_length=20)
    (row,) = task.rows.inputs([{"text": "good film", "pair": "bad"}])
    ids, types = theirs.encode_for_model("good film", "bad")
    assert row == {"input_ids": ids, **({"token_type_ids": types} if typed else {})}
    tables = task.adapt(model_config("encoder-tiny")).embedding.type_vocab_size
    assert tables == (2 if typed else model_config("encoder-tiny").embedding.type_vocab_size)


def test_the_longer_of_two_texts_is_cut_and_said(tokenizer: Tokenizer):
    row = {"text": "good " * 9, "pair": "bad", "label": "same"}
    with pytest.raises(
        InputError, match=r"text 1 \('good good.* has 13 tokens, more than task.max_length 10"
    ):
        pairs(tokenizer).rows.prepare([row])
    task = pairs(tokenizer, too_long="cut", token_dropout=0.9)
    (example,) = task.rows.prepare([row])
    assert len(example["input_ids"]) == 10
    assert example["input_ids"].count(tokenizer.sep_id) == 2
    assert example["input_ids"][-2] == tokenizer.encode("bad")[0]
    assert task.notes == ["1 of 1 texts are cut to 10 tokens"]
    assert task.rows.corrupt is not None
    hidden = task.rows.corrupt(example, np.random.default_rng(0))["input_ids"]
    assert (hidden == tokenizer.sep_id).sum() == 2


def test_a_model_learns_whether_two_texts_agree(tokenizer: Tokenizer):
    task = pairs(tokenizer)
    _, after = learned(task, model_config("encoder-tiny"), PAIRS, steps=80)
    assert after["accuracy"] == 1


def test_one_text_and_two_are_not_mistaken(tokenizer: Tokenizer):
    with pytest.raises(InputError, match="pair: expected a second text for each, the task's pair, got none"):
        pairs(tokenizer).classify(torch.nn.Identity(), ["good"])
    with pytest.raises(InputError, match="pair: expected one text, for which it was trained, got two"):
        build(tokenizer).classify(torch.nn.Identity(), ["good"], ["bad"])
