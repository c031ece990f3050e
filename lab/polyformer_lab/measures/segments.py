"""Perplexity of one held-out text in segments of several lengths, which a model reads independently."""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyformer.models.architectures import Transformer
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell, Row, measurement


@measurement("length")
def segments(cell: Cell, lengths: Sequence[int], held_out: int) -> Iterator[Row]:
    """Yield the perplexity of the first `held_out` validation tokens by the length of the segments."""
    ids = first_tokens(cell.fitted, held_out)
    for length in lengths:
        yield {"length": length, "perplexity": perplexity(cell.fitted.model, ids, length)}


def first_tokens(fitted: Fitted, most: int) -> Tensor:
    """Return the first `most` tokens of the validation text as a stream, [N]."""
    assert isinstance(fitted.task, LanguageModelling)
    assert fitted.splits.validation is not None
    documents = fitted.task.documents(list(fitted.splits.validation))
    return torch.tensor(list(itertools.islice(itertools.chain.from_iterable(documents), most)))


@torch.no_grad()
def perplexity(model: Transformer, ids: Tensor, length: int) -> float | None:
    """Return exp of the mean nats over all `ids` [N] except the first; None for more tokens than positions.

    A segment of `length` tokens begins with the last token of the segment before: every token is predicted
    once, from at most length - 1 others.
    """
    assert model.decoder is not None
    limit = model.decoder.position.max_positions
    if limit is not None and length > limit:
        return None
    model.eval()
    nats = 0.0
    for batch in batches(ids.to(next(model.parameters()).device), length):
        nats += float(model(input_ids=batch, labels=batch).loss) * batch[:, 1:].numel()
    return exp(nats / (len(ids) - 1))


def batches(ids: Tensor, length: int, batch_tokens: int = 4096) -> Iterator[Tensor]:
    """Yield batches of whole segments [B, length], then the remaining tokens [1, R]."""
    whole = ids.unfold(0, length, length - 1) if len(ids) >= length else ids.new_empty(0, length)
    if len(whole):
        yield from whole.split(max(1, batch_tokens // length))
    rest = ids[len(whole) * (length - 1) :]
    if len(rest) > 1:
        yield rest.unsqueeze(0)
