"""A tiny task and model for the tests of training: real data made from a seed, dropout, ragged weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from polyformer.core.config import Config
from polyformer.training.config import ReportingConfig, SavingConfig, TrainingConfig
from polyformer.training.loop import Result, train
from polyformer.training.optimizers import OptimizerConfig, ScheduleConfig
from polyformer.training.task import Batch, share

WORDS = 11


class TinyModel(nn.Module):
    """Bag of two tokens -> next token, with dropout, a tied table and a buffer that counts calls."""

    calls: torch.Tensor

    def __init__(self, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = nn.Embedding(WORDS, 8, dtype=dtype)
        self.inner = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.out = nn.Linear(8, WORDS, bias=False, dtype=dtype)
        self.dropout = dropout
        self.recompute = False
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3
        self.out.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += int(self.training)
        x = F.dropout(self.table(input_ids), self.dropout, self.training)
        logits = self.out(self.norm(torch.tanh(self.inner(x)) + x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TinyTask:
    """Sequences where token i+1 follows from token i; each batch has its own number of rows and of labels."""

    best = "loss"
    direction: Literal["min", "max"] = "min"

    def __init__(self, batches: int = 7, rows: int = 3, empty: int | None = None) -> None:
        self.count, self.rows, self.empty = batches, rows, empty

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        for number in share(range(self.count), skip, rank, world):
            yield self.batch(1000 * epoch + number, empty=number == self.empty)

    def batch(self, seed: int, empty: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, WORDS, (1 + seed % self.rows, 5), generator=generator)
        labels = (ids * 3 + 1) % WORDS
        kept = torch.rand(ids.shape, generator=generator) < 0.7
        kept[0, 0] = True
        return {"input_ids": ids, "labels": labels.masked_fill(~kept | empty, -100)}

    def weight(self, batch: Batch) -> int:
        return int((batch["labels"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(**batch)

    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        losses = [float(model(**self.batch(seed))) for seed in range(90, 93)]
        return {"loss": sum(losses) / len(losses), "worst": max(losses)}


def settings(**options: object) -> TrainingConfig:
    """A short run with checkpoints every 5 steps; `options` as `Config.override` takes them."""
    config: Config = TrainingConfig(
        steps=20,
        saving=SavingConfig(checkpoint_every=5),
        reporting=ReportingConfig(log_every=3, evaluate_every=10),
    ).override("device", "cpu")
    for name, value in options.items():
        config = config.override(name, value)
    assert isinstance(config, TrainingConfig)
    return config


def run(
    out: str | Path,
    *,
    resume: bool = False,
    from_step: int | None = None,
    task: TinyTask | None = None,
    dropout: float = 0.2,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "adamw",
    lr: float = 0.01,
    **options: object,
) -> tuple[TinyModel, Result]:
    """Train the tiny model into `out`."""
    model = TinyModel(dropout, dtype)
    schedule = ScheduleConfig.from_dict({"kind": "cosine", "warmup": 4})
    config = settings(**options)
    chosen = OptimizerConfig.from_dict({"kind": optimizer, "lr": lr})
    task = task or TinyTask()
    result = train(model, task, config, chosen, schedule, out, seed=3, resume=resume, from_step=from_step)
    return model, result
