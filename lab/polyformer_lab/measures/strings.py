"""Encoder-decoders that copy or reverse strings of digits or add numbers, tested on longer strings."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from polyformer.core.sequence.tokens import Tokens
from polyformer.data.string_tasks import END, PAD, START, STRINGS, VOCABULARY
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelOutput
from polyformer.training import Batch
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.generated import Options, created, trained
from polyformer_lab.recurrent import RecurrentWriter

RECURRENT = "recurrent"
"""The name of recurrent encoder-decoders in the place of a preset."""


class FromPosition(nn.Module):
    """An encoder-decoder with a source and a target that begin at the position `start`."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, labels: Tensor, start: Tensor) -> ModelOutput:
        """Return loss and predictions for sources [B, S] and targets [B, T]."""
        first = int(start)
        pos = torch.arange(first, first + source.shape[1], device=source.device)
        state = self.model.encode(source, position_ids=pos)
        state = dataclasses.replace(state, tokens=Tokens(0, dropped=first))
        target = self.model.shifted_right(labels, None)
        return self.model(decoder_input_ids=target, labels=labels, state=state)


@measurement("digits")
def strings(
    cell: Cell,
    task: str,
    model: Options,
    length: int,
    lengths: Sequence[int],
    positions: int,
    rows: int,
    tested: int,
    steps: int,
    lr: float,
) -> Iterator[Row]:
    """Yield for each length the shares of target tokens and of whole strings that are predicted.

    Each token is predicted after the true tokens before it: the model generates a string if it predicts all
    tokens of the string.

    Args:
        cell: the cell; its folder gets the training.
        task: "copy", "reverse" or "add".
        model: a preset and its options, or `RECURRENT` and the options of `RecurrentWriter`.
        length: digits of the longest source in training.
        lengths: digits of the test sources, the same strings for every model.
        positions: the positions that occur in training.
        rows: strings in a batch.
        tested: test strings of each length.
        steps: training steps.
        lr: the highest learning rate.
    """

    def drawn(generator: torch.Generator) -> Batch:
        digits = int(torch.randint(1, length + 1, (), generator=generator))
        return placed(task, digits, rows, positions, generator)

    writer = trained(cell, lambda: writer_of(model), drawn, steps, lr)
    for digits in lengths:
        batch = placed(task, digits, tested, positions, torch.Generator().manual_seed(digits))
        with torch.no_grad():
            right = writer(**batch).logits.argmax(-1) == batch["labels"]
        tokens, whole = right.float().mean(), right.all(1).float().mean()
        yield {"digits": digits, "tokens": float(tokens), "strings": float(whole)}


def writer_of(model: Options) -> nn.Module:
    """Return an encoder-decoder of strings with fresh weights, recurrent or a Transformer."""
    if model["preset"] == RECURRENT:
        options = {name: value for name, value in model.items() if name != "preset"}
        return RecurrentWriter(VOCABULARY, START, **options)
    return FromPosition(created(model, vocab_size=VOCABULARY, pad=PAD, bos=START, eos=END))


def placed(task: str, digits: int, rows: int, positions: int, generator: torch.Generator) -> Batch:
    """Return strings of one length, and the positions where they begin."""
    source, target = STRINGS[task](rows, digits, generator)
    longest = max(source.shape[1], target.shape[1])
    start = torch.randint(0, max(1, positions - longest), (), generator=generator)
    return {"source": source, "labels": target, "start": start}
