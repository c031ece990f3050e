"""Decoders that say after every bit of a string whether the number of ones so far is odd."""

from collections.abc import Iterator, Sequence

import torch

from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import Options, created, trained


@measurement("bits")
def parities(
    cell: Cell,
    model: Options,
    length: int,
    lengths: Sequence[int],
    rows: int,
    tested: int,
    steps: int,
    lr: float,
) -> Iterator[Row]:
    """Yield for each length the share of test strings with the right parity after the last bit.

    Args:
        cell: the cell; its folder gets the training.
        model: a preset and its options.
        length: bits of the longest string in training.
        lengths: bits of the test strings, the same strings for every model.
        rows: strings in a batch.
        tested: test strings of each length.
        steps: training steps.
        lr: the highest learning rate.
    """

    def drawn(generator: torch.Generator) -> Batch:
        return strings_of_bits(rows, int(torch.randint(1, length + 1, (), generator=generator)), generator)

    labeller = trained(cell, lambda: created(model, vocab_size=2), drawn, steps, lr)
    for bits in lengths:
        batch = strings_of_bits(tested, bits, torch.Generator().manual_seed(bits))
        with torch.no_grad():
            right = labeller(**batch).logits.argmax(-1) == batch["shift_labels"]
        yield {"bits": bits, "right": float(right[:, -1].float().mean())}


def strings_of_bits(rows: int, length: int, generator: torch.Generator) -> Batch:
    """Return random bits [rows, length] and the parity of each prefix."""
    bits = torch.randint(0, 2, (rows, length), generator=generator)
    return {"input_ids": bits, "shift_labels": bits.cumsum(1) % 2}
