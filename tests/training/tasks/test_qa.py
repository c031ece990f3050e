"""Question answering: windows and labels, answers over windows, scores, and that it learns."""

from typing import Any

import numpy as np
import pytest
import torch
from fitted import learned

from polyformer import InputError
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import QuestionAnswering, QuestionAnsweringConfig

CONTEXT = "Anna lives in Oslo. Bert lives in Rome. Carl lives in Lima."
SIZES = {"max_length": 64, "max_question": 20, "stride": 20, "batch_tokens": 256}


def asked(question: str, *answers: str) -> dict[str, Any]:
    starts = [CONTEXT.index(answer) for answer in answers]
    return {
        "question": question,
        "context": CONTEXT,
        "answers": {"text": list(answers), "answer_start": starts},
    }


ROWS = [asked("Where is Anna?", "Oslo"), asked("Where is Bert?", "Rome"), asked("Where is Carl?", "Lima")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


def build(tokenizer: Tokenizer, **options: Any) -> QuestionAnswering:
    return QuestionAnsweringConfig(**{**SIZES, **options}).build(tokenizer)


def test_labels_are_the_answer_where_a_window_has_it(tokenizer: Tokenizer):
    rows = build(tokenizer).rows.prepare(ROWS[2:])
    texts = []
    for row in rows:
        first, last = row["labels"]
        texts.append(tokenizer.decode(row["input_ids"][first : last + 1], keep_special=True))
        assert row["token_type_ids"][first] == row["token_type_ids"][last] == int(first > 0)
        assert len(row["input_ids"]) <= 64
    assert texts == ["<s>", "Lima"]  # 59 characters in windows of 47, the second from 20 on


def test_a_long_question_loses_its_end(tokenizer: Tokenizer):
    row = build(tokenizer).rows.prepare([{**ROWS[0], "question": "Where " * 10}])[0]
    assert row["input_ids"][:22] == [tokenizer.cls_id, *("Where " * 10).encode()[:20], tokenizer.sep_id]


class Said(torch.nn.Module):
    """A model that finds `text` in any window, and scores what it finds; elsewhere <cls> is best."""

    def __init__(self, texts: dict[str, float], none: float):
        super().__init__()
        self.texts, self.none = texts, none
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, token_type_ids, attention_mask):
        assert input_ids.shape == token_type_ids.shape == attention_mask.shape
        logits = torch.full((*input_ids.shape, 2), -5.0)
        logits[:, 0] = self.none
        for text, score in self.texts.items():
            size = len(text)
            where = torch.tensor(list(text.encode()))
            for row, ids in enumerate(input_ids):
                for start in torch.nonzero((ids.unfold(0, size, 1) == where).all(1)).flatten().tolist():
                    logits[row, start, 0], logits[row, start + size - 1, 1] = score, score
        return type("Output", (), {"logits": logits})()


def test_the_best_window_answers(tokenizer: Tokenizer):
    task = build(tokenizer)
    assert task.answer(Said({"Oslo": 1.0, "Lima": 2.0}, none=9.0), ROWS) == ["Lima"] * 3
    assert task.answer(Said({"Oslo": 3.0, "Lima": 2.0}, none=9.0), ROWS) == ["Oslo"] * 3
    # the question's own words are never the answer, nor is a span longer than allowed
    assert task.answer(Said({"Where is": 9.0, "Rome": 1.0}, none=0.0), ROWS[:1]) == ["Rome"]
    short = build(tokenizer, max_answer=3)
    assert len(short.answer(Said({"Oslo": 1.0}, none=0.0), ROWS[:1])[0]) <= 3
    assert task.answer(Said({}, none=0.0), []) == []


def test_no_answer_where_it_is_better_than_any(tokenizer: Tokenizer):
    model = Said({"Oslo": 1.0, "Lima": 2.0}, none=3.0)  # spans score 4, no answer 6
    assert build(tokenizer, unanswerable=True).answer(model, ROWS[:1]) == [""]
    assert build(tokenizer, unanswerable=True, threshold=2.5).answer(model, ROWS[:1]) == ["Lima"]
    assert build(tokenizer).answer(model, ROWS[:1]) == ["Lima"]


def test_scores_are_percents_over_questions(tokenizer: Tokenizer):
    metrics = build(tokenizer).finish(Said({"in Oslo": 1.0}, none=0.0), ROWS)
    assert metrics == {"exact_match": 0.0, "f1": pytest.approx(100 * 2 / 3 / 3)}
    metrics = build(tokenizer).finish(Said({"Oslo.": 1.0}, none=0.0), ROWS)
    assert metrics == {"exact_match": pytest.approx(100 / 3), "f1": pytest.approx(100 / 3)}


def test_every_text_is_learnt_from_once(tokenizer: Tokenizer):
    assert list(QuestionAnsweringConfig().texts(ROWS)) == [
        ROWS[0]["question"],
        CONTEXT,
        *(r["question"] for r in ROWS[1:]),
    ]


def test_a_model_learns_where_the_answers_are():
    texts = ["Anna lives in Oslo .", "Rome is where Bert lives .", "In Lima lives Carl ."]
    places = ["Oslo", "Rome", "Lima"]
    rows = [
        {
            "question": "Where ?",
            "context": text,
            "answers": {"text": [place], "answer_start": [text.index(place)]},
        }
        for text, place in zip(texts, places)
    ]
    words = Tokenizer.train(TokenizerConfig(algorithm="wordpiece", vocab_size=120), [*texts, "Where ?"])
    task = QuestionAnsweringConfig(max_length=20, max_question=4, stride=10, batch_tokens=256).build(words)
    before, after = learned(task, model_config("encoder-tiny"), rows, steps=80)
    assert before["loss"] > 2
    assert after["loss"] < 0.5
    assert after["accuracy"] == 1


def test_a_trained_model_is_scored(tokenizer: Tokenizer):
    task = build(tokenizer)
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny"))).eval()
    scores = task.score(model, ROWS)
    assert set(scores) == {"loss", "accuracy", "exact_match", "f1"}
    assert scores["loss"] == pytest.approx(np.log(60), rel=0.2)  # untrained: about uniform over the window
    answers = task.answer(model, ROWS)
    assert all(answer in CONTEXT for answer in answers)
    assert answers == [task.answer(model, [row])[0] for row in ROWS]  # whatever is beside it in a batch


def test_questions_without_answers(tokenizer: Tokenizer):
    none = [asked("Where is Dora?")]
    with pytest.raises(InputError, match=r"answers: 'Where is Dora\?' has none; set task.unanswerable"):
        build(tokenizer).rows.prepare(none)
    assert [row["labels"].tolist() for row in build(tokenizer, unanswerable=True).rows.prepare(none)] == [
        [0, 0]
    ] * 2


def test_an_answer_that_is_not_in_its_context_is_refused(tokenizer: Tokenizer):
    wrong = {**ROWS[0], "answers": {"text": ["Oslo"], "answer_start": [3]}}
    with pytest.raises(
        InputError, match="answers: expected 'Oslo' at character 3 of the context, got 'a li'"
    ):
        build(tokenizer).rows.prepare([wrong])
