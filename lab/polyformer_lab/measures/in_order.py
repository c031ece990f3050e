"""Perplexity of a held-out text that is read in order, with memories and stores of several lengths."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from polyformer.models.checkpoints import convert
from polyformer.nn.memory.base import set_length
from polyformer.nn.memory.memorizing import set_store
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModelling
from polyformer_lab.cells import Cell, Row, measurement

CONVERTED = "converted"
"""The folder, within the run's folder, of its model with another memory."""


@measurement()
def in_order(cell: Cell, held_out: int) -> Row:
    """Return the perplexity of the first `held_out` tokens of the validation text."""
    return {"perplexity": perplexity(cell.fitted, held_out)}


@measurement("memory", "overlap")
def in_order_by_memory(
    cell: Cell, held_out: int, memories: Sequence[int] = (), overlaps: Sequence[int] = ()
) -> Iterator[Row]:
    """Yield the perplexity with a memory of each length, or in rows that repeat the same number of tokens."""
    for length in memories:
        set_length(cell.fitted.model, length)
        yield {"memory": length, "perplexity": perplexity(cell.fitted, held_out)}
    for overlap in overlaps:
        yield {"overlap": overlap, "perplexity": perplexity(cell.fitted, held_out, overlap)}


@measurement("store")
def in_order_by_store(
    cell: Cell, held_out: int, stores: Sequence[int] = (), convert_to: str | None = None
) -> Iterator[Row]:
    """Yield the perplexity with a store of each size, 0 for a model without a store.

    Args:
        cell: a run.
        held_out: the number of tokens to read.
        stores: the sizes, in entries; empty for a model without a store.
        convert_to: a memory; the model converted to it is saved in the run's folder `converted`.
    """
    for size in stores:
        set_store(cell.fitted.model, size)
        yield {"store": size, "perplexity": perplexity(cell.fitted, held_out)}
    if not stores:
        yield {"store": 0, "perplexity": perplexity(cell.fitted, held_out)}
    if convert_to is not None:
        convert(cell.fitted.model, memory=convert_to)[0].save_pretrained(cell.folder / CONVERTED)


@torch.no_grad()
def perplexity(fitted: Fitted, most: int, overlap: int = 0) -> float:
    """Return the perplexity of the first validation documents, at least `most` tokens.

    The documents are read in order; with an overlap, in rows that repeat this number of tokens of the row
    before.
    """
    task = fitted.task
    assert isinstance(task, LanguageModelling)
    assert fitted.splits.validation is not None
    if overlap:
        options = dataclasses.replace(task.config, feed="packed", overlap=overlap)
        task = LanguageModelling(options, task.tokenizer)
    held: list[Any] = list(fitted.splits.validation)
    rows, tokens = list[Any](), 0
    while held and tokens < most:
        rows.append(held.pop(0))
        tokens += len(task.documents(rows[-1:])[0])
    return task.measure(fitted.model.eval(), task.held_out(rows))["perplexity"]
