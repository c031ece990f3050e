"""Caches: any split into chunks is one pass, with padding, with reordered rows, and in generation."""

import torch
from torch import Tensor

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.padding import padded
from polyformer.applications.audit.subject import NotApplicableError, Subject, distance


def chunked(subject: Subject, x: Tensor, first: int, chunk: int, mask: Tensor | None = None) -> Tensor:
    """Return the outputs of x, read as `first` tokens and then `chunk` tokens per call."""
    outputs, state, start = [], None, 0
    while start < x.shape[1]:
        stop = min(x.shape[1], start + (chunk if start else first))
        output, state = subject.step(x[:, start:stop], state, None if mask is None else mask[:, :stop])
        outputs.append(output)
        start = stop
    return torch.cat(outputs, 1)


@check(
    "a text in chunks with a cache has other outputs than in a single pass",
    lambda n: [(n, 1, 1), (n, n // 2, n // 4), (n, n // 4, n)],
)
def chunks(subject: Subject, length: int = 2, first: int = 1, chunk: int = 1) -> tuple[Tensor, Tensor]:
    """Read token by token, in small chunks, and in two parts."""
    subject.needs("state")
    x = subject.draw(2, length)
    return chunked(subject, x, first, chunk), subject.run(x)


@check(
    "a text after padding has other outputs in chunks with a cache than without padding",
    lambda n: [(n - 4, 3, 1), (n - 4, 3, 2)],
)
def padded_chunks(subject: Subject, length: int = 2, left: int = 1, chunk: int = 1) -> tuple[Tensor, Tensor]:
    """Pad on the left, read the padding with half of the text, then the rest in chunks.

    The expected outputs come from one padded pass, which "left padding" compares with the text.
    """
    subject.needs("state", "attention_mask")
    ids, mask = padded(subject, subject.draw(2, length), left, 0)
    expected = subject.run(ids, attention_mask=mask)
    return chunked(subject, ids, left + length // 2, chunk, mask)[:, left:], expected[:, left:]


@check("outputs after the rows of a cache are reordered differ from a single pass", lambda n: [(n // 2, 3)])
def beams(subject: Subject, length: int = 1, steps: int = 1) -> Gap:
    """Drop, repeat and move rows as beam search does before every step; beams then read different tokens."""
    subject.needs("state")
    x, new = subject.draw(3, length), subject.draw(3, steps + 3, seed=1)
    _, state = subject.step(x)
    worst = 0.0
    for step, order in zip(range(steps), ([1, 1, 0], [0, 2, 0], [2, 0, 1])):
        index = torch.tensor(order, device=x.device)
        state, x = subject.reorder(state, index), torch.cat([x[index], new[:, step : step + 1]], 1)
        output, state = subject.step(x[:, -1:], state)
        worst = max(worst, distance(output[:, -1], subject.run(x)[:, -1]))
    return Gap(worst, subject.rounding)


@check(
    "greedy generation with a cache has other logits than without",
    lambda n: [(n // 2, 2, 5)],
    whole_rows=True,
)
def generation(subject: Subject, length: int = 1, left: int = 0, new: int = 1) -> Gap:
    """Compare the logits of each new token, as long as the chosen tokens are the same."""
    generate = subject.generate
    if generate is None:
        raise NotApplicableError("the model has no function that generates")
    ids, mask = padded(subject, subject.draw(2, length), left, 0)
    cached, plain = (generate(subject.module, ids, mask, new, cache) for cache in (True, False))
    same, worst = torch.ones(len(ids), dtype=torch.bool, device=ids.device), 0.0
    for step in range(min(cached.shape[1], plain.shape[1])):
        if same.any():
            worst = max(worst, distance(cached[same, step], plain[same, step]))
        same &= cached[:, step].argmax(-1) == plain[:, step].argmax(-1)
    return Gap(worst, subject.rounding)
