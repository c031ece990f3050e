"""What claims on generated data share: training on batches that a function makes of a number."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.training import (
    Batch,
    OptimizerConfig,
    ReportingConfig,
    SavingConfig,
    ScheduleConfig,
    TrainingConfig,
    share,
    train,
)


class Generated:
    """Batch number n is what `make` makes of a generator that is seeded by `seed` and n; no end to them."""

    best = "loss"
    direction: Literal["min", "max"] = "min"

    def __init__(self, make: Callable[[torch.Generator], Batch], seed: int):
        self.make, self.seed = make, seed

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """All in one epoch."""
        for number in share(range(1 << 40), skip, rank, world):
            yield self.make(torch.Generator().manual_seed((self.seed << 40) + number))

    def weight(self, batch: Batch) -> int:
        """Labelled tokens."""
        return int((batch["labels"] != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The model's own."""
        return model(**batch).loss

    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        """Nothing: claims measure afterwards."""
        return {}


def trained(model: nn.Module, task: Generated, steps: int, lr: float, settings: Config, folder: Path) -> None:
    """Trains `model`, or goes on with the run in `folder`; nothing more where that is finished.

    Adam, with a warm-up and a cosine. Raises `InputError` where the folder holds a run of other `settings`.
    """
    text, place = json.dumps(settings.to_dict(), indent=2), folder / "settings.json"
    begun = place.is_file()
    if begun and place.read_text() != text:
        raise InputError(f"{folder} holds a run of other settings; choose another place with --out")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(place, text.encode())
    config = TrainingConfig(
        steps=steps,
        saving=SavingConfig(checkpoint_every=500),
        reporting=ReportingConfig(log_every=50, evaluate_every=steps),
    )
    optimizer = OptimizerConfig.from_dict({"kind": "adam", "lr": lr})
    schedule = ScheduleConfig.from_dict({"kind": "cosine", "warmup": min(200, steps)})
    train(model, task, config, optimizer, schedule, folder, seed=task.seed, resume=begun)
    model.eval()
