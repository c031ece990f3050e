"""Training on batches that a function makes from a number."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.models.presets import create_model
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
from polyformer_lab.cells import Cell

Model = TypeVar("Model", bound=nn.Module)
Make = Callable[[torch.Generator], Batch]
Options = Mapping[str, Any]

HELD_OUT = (1 << 62) + 1
"""The seed of test batches; the seeds of training are smaller."""


def created(model: Options, **more: Any) -> Any:
    """Return the `preset` of a study with its options and `more`, with fresh weights."""
    options = dict(model)
    return create_model(options.pop("preset"), **{**options, **more})


def tagger(model: Options, vocab_size: int, num_labels: int) -> Any:
    """Return an encoder with fresh weights that names a label at every token."""
    head = {"kind": "tag", "num_labels": num_labels, "dropout": 0.0}
    return created(model, vocab_size=vocab_size, head=head)


class Generated:
    """An endless data set: batch n is the result of `make` for a generator that is seeded by `seed` and n."""

    best = "loss"
    direction: Literal["min", "max"] = "min"

    def __init__(self, make: Make, seed: int):
        self.make, self.seed = make, seed

    def batches(self, epoch: int, skip: int, rank: int, world: int) -> Iterator[Batch]:
        """Yield all batches in one epoch."""
        for number in share(range(1 << 40), skip, rank, world):
            yield self.make(torch.Generator().manual_seed((self.seed << 40) + number))

    def weight(self, batch: Batch) -> int:
        """Return the number of labelled tokens."""
        labels = batch["labels"] if "labels" in batch else batch["shift_labels"]
        return int((labels != -100).sum())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss of the model."""
        return model(**batch).loss

    def evaluate(self, model: nn.Module, accelerator: Any) -> dict[str, float]:
        """Return no scores: the measurement follows."""
        return {}


def trained(cell: Cell, create: Callable[[], Model], make: Make, steps: int, lr: float) -> Model:
    """Return a model trained by Adam with a warm-up and a cosine, or resume the run in the cell's folder.

    Raises:
        InputError: the folder holds a run of other settings.
    """
    settings, place = cell.folder / "settings.json", cell.folder
    begun = settings.is_file()
    if begun and read_json(settings, dict) != cell.settings:
        raise InputError(f"{place} holds a run of other settings; choose another place with --out")
    place.mkdir(parents=True, exist_ok=True)
    write_json(settings, cell.settings)
    torch.manual_seed(cell.seed or 0)
    model = create()
    config = TrainingConfig(
        steps=steps,
        saving=SavingConfig(checkpoint_every=500),
        reporting=ReportingConfig(log_every=50, evaluate_every=steps),
    )
    optimizer = OptimizerConfig.from_dict({"kind": "adam", "lr": lr})
    schedule = ScheduleConfig.from_dict({"kind": "cosine", "warmup": min(200, steps)})
    task = Generated(make, cell.seed or 0)
    train(model, task, config, optimizer, schedule, place, seed=task.seed, resume=begun)
    return model.eval()
