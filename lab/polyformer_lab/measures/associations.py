"""Decoders that recall the values of keys: S tokens with a key and a value each, then every key again."""

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
    """

    def drawn(generator: torch.Generator) -> Batch:
        pairs = int(torch.randint(1, length + 1, (), generator=generator))
        return rows_of_pairs(rows, pairs, keys, values, generator)

    vocabulary = {"vocab_size": max(keys, values), "type_vocab_size": values + 1}
    labeller = trained(cell, lambda: created(model, **vocabulary), drawn, steps, lr)
    for pairs in lengths:
        batch = rows_of_pairs(tested, pairs, keys, values, torch.Generator().manual_seed(pairs))
        with torch.no_grad():
            right = labeller(**batch).logits.argmax(-1) == batch["shift_labels"]
        yield {"pairs": pairs, "right": float(right[:, pairs:].float().mean())}


def rows_of_pairs(rows: int, pairs: int, keys: int, values: int, generator: torch.Generator) -> Batch:
    """Return rows of different keys with values as types, then of the same keys in another order."""
    order = torch.rand(rows, keys, generator=generator).argsort(1)[:, :pairs]
    value = torch.randint(values, (rows, pairs), generator=generator)
    asked = torch.rand(rows, pairs, generator=generator).argsort(1)
    types = torch.cat([value + 1, torch.full_like(value, ASKED)], 1)
    labels = torch.cat([torch.full_like(value, -100), value.gather(1, asked)], 1)
    return {
        "input_ids": torch.cat([order, order.gather(1, asked)], 1),
        "token_type_ids": types,
        "shift_labels": labels,
    }
