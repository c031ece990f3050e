"""A new task is a configuration, the rows that it does not share, and a declaration of its parts."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.data.rows import Row
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.nn.heads import LanguageModelConfig
from polyformer.training.tasks import TaskWithData, TextTask, TextTaskConfig
from polyformer.training.tasks.text import Perplexity, TextArchitecture, TextRows
from training.tasks.fitted import learned

ROWS = [{"question": f"{a} and {b}", "answer": b + a} for a in "abcd" for b in "efgh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswersConfig(TextTaskConfig):
    """Answers: continue a question by its answer; only the answer has labels."""

    max_length: int = 16

    needs: ClassVar[tuple[str, ...]] = ("question", "answer")
    text_columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    length_option: ClassVar[str] = "max_length"


class AnsweredQuestions(TextRows):
    """Rows question answer <eos>, with labels from the answer on."""

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        prepared = []
        for row in rows:
            question, answer = (self.tokenizer.encode(row[name]) for name in ("question", "answer"))
            answer = [*answer, self.tokenizer.eos_id]
            labels = [IGNORED] * len(question) + answer
            prepared.append({"input_ids": [*question, *answer], "labels": labels})
        return prepared


class Answers(TextTask, config=AnswersConfig):
    """Answers to questions, with metrics over the tokens of the answers."""

    def __init__(self, config: AnswersConfig, tokenizer: Tokenizer):
        super().__init__(
            config,
            tokenizer,
            rows=AnsweredQuestions(config, tokenizer),
            architecture=TextArchitecture("decoder", LanguageModelConfig(), tokenizer, config.max_length),
            metrics=Perplexity(),
        )


@pytest.fixture
def task() -> Answers:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return AnswersConfig(batch_tokens=200).build(tokenizer)


def test_a_declared_task_is_trained_and_measured_on_its_labels(task: Answers):
    before, after = learned(task, model_config("decoder-tiny"), ROWS, steps=30, lr=1e-2)
    assert after["loss"] < before["loss"] / 3
    assert after["perplexity"] == pytest.approx(torch.tensor(after["loss"]).exp().item(), rel=1e-5)


def test_questions_have_no_labels(task: Answers):
    data = TaskWithData(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
    batches = list(data.batches(0, 0, 0, 1))
    assert sum(map(data.weight, batches)) == 3 * len(ROWS), "two letters and <eos> of each answer"
    model = Transformer(task.adapt(model_config("decoder-tiny"))).eval()
    changed = {**batches[0], "labels": batches[0]["labels"].clone()}
    changed["labels"][changed["labels"] == IGNORED] = 0
    assert data.loss(model, batches[0]) != data.loss(model, changed)


def test_parts_refuse_other_models_and_batches(task: Answers):
    with pytest.raises(InputError, match="model: "):
        task.adapt(model_config("encoder-tiny"))
    with pytest.raises(InputError, match="batch_tokens: "):
        AnswersConfig(max_length=64, batch_tokens=32)
