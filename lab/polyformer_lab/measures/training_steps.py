"""The time of a training step with the same tokens in shorter and longer rows."""

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

import polyformer_lab.recurrent  # noqa: F401  (registers the recurrent parts of the models)
from polyformer.core.measuring import time_interleaved
from polyformer.models.architectures import Transformer
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import Options, created


@measurement("model", "length")
def training_steps(
    cell: Cell, models: Mapping[str, Options], tokens: int, lengths: Sequence[int], repeats: int
) -> Iterator[Row]:
    """Yield for each model and length the least milliseconds of forward and backward.

    Args:
        cell: the cell; nothing is trained.
        models: by name a preset of decoders and its options; parts of `polyformer_lab.recurrent` are known.
        tokens: tokens of a step.
        lengths: tokens of a row.
        repeats: the timed steps of each.
    """
    steps = {}
    for name, own in models.items():
        model = created(own).train()
        for length in lengths:
            ids = torch.randint(0, model.config.vocab_size, (tokens // length, length))
            steps[name, length] = functools.partial(_step, model, ids)
    for (name, length), seconds in time_interleaved(steps, repeats).items():
        yield {"model": name, "length": length, "milliseconds": 1e3 * min(seconds)}


def _step(model: Transformer, ids: Tensor) -> None:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
