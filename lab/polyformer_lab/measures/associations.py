"""Decoders that recall values of keys: tokens with a key and a value each, then every key again."""

from collections.abc import Iterator, Sequence

import torch

from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import Options, created, trained

ASKED = 0
"""The type of a key without a value; the value v has the type v + 1."""


@measurement("pairs")
def associations(
    cell: Cell,
    model: Options,
    keys: int,
    values: int,
    length: int,
    lengths: Sequence[int],
    rows: int,
    tested: int,
    steps: int,
    lr: float,
    writes: int = 1,
) -> Iterator[Row]:
    """Yield for each number of pairs the share of keys with the right value.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options.
        keys, values: how many there are.
        length: the greatest number of pairs in training.
        lengths: numbers of pairs in the tests, the same rows for every model.
        rows: rows in a batch.
        tested: test rows of each number of pairs.
        steps: training steps.
        lr: the highest learning rate.
        writes: how often each key gets a value; the last value is right.
    """

    def drawn(generator: torch.Generator) -> Batch:
        pairs = int(torch.randint(1, length + 1, (), generator=generator))
        return rows_of_pairs(rows, pairs, keys, values, generator, writes)

    vocabulary = {"vocab_size": max(keys, values), "type_vocab_size": values + 1}
    labeller = trained(cell, lambda: created(model, **vocabulary), drawn, steps, lr)
    for pairs in lengths:
        generator = torch.Generator().manual_seed(pairs)
        batch = rows_of_pairs(tested, pairs, keys, values, generator, writes)
        with torch.no_grad():
            right = labeller(**batch).logits.argmax(-1) == batch["shift_labels"]
        yield {"pairs": pairs, "right": float(right[:, -pairs:].float().mean())}


def rows_of_pairs(
    rows: int, pairs: int, keys: int, values: int, generator: torch.Generator, writes: int
) -> Batch:
    """Return rows of keys with values as types, `writes` times in random order, then of the same keys."""
    order = torch.rand(rows, keys, generator=generator).argsort(1)[:, :pairs]
    position = torch.rand(rows, pairs * writes, generator=generator).argsort(1) % pairs
    value = torch.randint(values, position.shape, generator=generator)
    asked = torch.rand(rows, pairs, generator=generator).argsort(1)
    latest = torch.zeros_like(order)
    for index in range(pairs * writes):
        latest.scatter_(1, position[:, index : index + 1], value[:, index : index + 1])
    types = torch.cat([value + 1, torch.full_like(asked, ASKED)], 1)
    labels = torch.cat([torch.full_like(value, -100), latest.gather(1, asked)], 1)
    return {
        "input_ids": torch.cat([order.gather(1, position), order.gather(1, asked)], 1),
        "token_type_ids": types,
        "shift_labels": labels,
    }
