"""A task with its data, as the training loop sees it."""

from typing import Any

import pytest
import torch

from polyformer.data import DataConfig, Splits, Tokenizer, TokenizerConfig, load
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training import TrainingTask
from polyformer.training.tasks import LanguageModelling, LanguageModellingConfig, TaskWithData, Workers


@pytest.fixture(scope="module")
def task() -> LanguageModelling:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return LanguageModellingConfig(row_length=8, batch_tokens=16).build(tokenizer)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Splits, Splits]:
    """The same lines in memory and streamed."""
    path = tmp_path_factory.mktemp("data") / "lines.txt"
    path.write_text("".join(f"line number {i}\n" for i in range(40)))
    return tuple(
        load(DataConfig(path=str(path), format="lines", streaming=streaming), ("text",))
        for streaming in (False, True)
    )  # type: ignore[return-value]


def listed(batches: Any) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in batches]


@pytest.mark.parametrize("streamed", [False, True])
def test_processes_share_what_is_left_of_an_epoch(
    task: LanguageModelling, splits: tuple[Splits, Splits], streamed: bool
):
    fitting = TaskWithData(task, splits[streamed], seed=5)
    assert isinstance(fitting, TrainingTask)
    whole = listed(fitting.batches(0, 0, 0, 1))
    assert len(whole) > 7
    assert listed(fitting.batches(0, 3, 0, 1)) == whole[3:]
    assert listed(fitting.batches(0, 3, 1, 2)) == whole[4::2]
    assert listed(fitting.batches(1, 0, 0, 1)) != whole


def test_workers_share_an_evaluation(task: LanguageModelling, splits: tuple[Splits, Splits]):
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("decoder-tiny", {"hidden_size": 16}))).eval()
    held = task.rows.held_out(splits[0].validation)  # type: ignore[arg-type]
    parts: list[torch.Tensor] = []

    def keep(total: torch.Tensor) -> torch.Tensor:
        parts.append(total)
        return total

    for rank in range(3):
        task.metrics.measure(model, held, Workers(rank, 3, keep))
    alone = task.metrics.measure(model, held)
    assert task.metrics.values(sum(parts[1:], parts[0]).tolist(), held.counts) == pytest.approx(alone)


def test_without_validation_there_are_no_metrics(task: LanguageModelling, splits: tuple[Splits, Splits]):
    fitting = TaskWithData(task, splits[0]._replace(validation=None), seed=0)
    assert fitting.evaluate(torch.nn.Identity(), None) == {}  # type: ignore[arg-type]
    assert (fitting.best, fitting.direction) == ("loss", "min")
