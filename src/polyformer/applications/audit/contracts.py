"""The contracts of an audit: what must change nothing in a model's outputs, each as a check.

padding         amount and content of padding change nothing, and a row of padding only is finite
caches          any split into chunks is one pass, with padding, with reordered rows, and in generation
independence    outputs depend on the past, on the own document and on the own row only
numbers         seeds repeat, half precisions are as exact as they can be, saved models are equal,
                gradients accumulate
"""

import copy
import dataclasses
import functools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.applications.audit.checks import Gap, NotApplicableError, Subject, check, distance


def padded(
    subject: Subject, x: Tensor, left: int, right: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return x between tokens of padding, and its mask [B, left + T + right].

    Padding is random by a seed; without a seed it is the id of padding, if there is any.
    """
    around = subject.draw(len(x), left + right, seed or 2) if left + right else x[:, :0]
    if seed is None and subject.pad is not None:
        around = torch.full_like(around, subject.pad)
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    mask = torch.nn.functional.pad(mask, (left, right))
    return torch.cat([around[:, :left], x, around[:, left:]], 1), mask


def _of_text(subject: Subject, length: int, left: int = 0, right: int = 0, seed: int | None = None) -> Tensor:
    """Return the outputs of a text's tokens, or of its row, between tokens of padding."""
    subject.needs("attention_mask")
    ids, mask = padded(subject, subject.draw(2, length), left, right, seed)
    output = subject.run(ids, attention_mask=mask)
    return output[:, left : left + length] if subject.per_token else output


@check("padding before a text changes its outputs", lambda n: [(n // 2, 3)], whole_rows=True)
def left_padding(subject: Subject, length: int = 1, left: int = 1) -> tuple[Tensor, Tensor]:
    """Compare with the text without padding."""
    return _of_text(subject, length, left), _of_text(subject, length)


@check("padding after a text changes its outputs", lambda n: [(n // 2, 3)], whole_rows=True)
def right_padding(subject: Subject, length: int = 1, right: int = 1) -> tuple[Tensor, Tensor]:
    """Compare with the text without padding."""
    return _of_text(subject, length, 0, right), _of_text(subject, length)


@check("the ids at padding change the outputs of the text", lambda n: [(n // 2, 3, 2)], whole_rows=True)
def padding_content(
    subject: Subject, length: int = 1, left: int = 0, right: int = 0
) -> tuple[Tensor, Tensor]:
    """Compare two texts that differ at padding only."""
    return _of_text(subject, length, left, right), _of_text(subject, length, left, right, seed=3)


@check(
    "a row of padding only has outputs or gradients that are not finite",
    lambda n: [(n // 2,)],
    whole_rows=True,
    gradients=True,
)
def empty_row(subject: Subject, length: int = 1) -> Gap:
    """Mask the first of two rows; count outputs and gradients that are not finite, and compare the other."""
    subject.needs("attention_mask")
    x = subject.draw(2, length)
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    mask[0] = 0
    output = subject.run(x, attention_mask=mask)
    slopes = subject.gradients(output.float().sin().sum())
    if bad := sum(int((~tensor.isfinite()).sum()) for tensor in (output, *slopes)):
        return Gap(bad, 0, f"{bad} entries are not finite")
    gap = distance(output[1:], subject.run(x[1:], attention_mask=mask[1:]))
    return Gap(gap, subject.rounding, "compares the other row with itself in a batch of 1")


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


Outputs = tuple[Tensor, Tensor]


def _split(n: int) -> Iterator[tuple[int, int]]:
    yield from ((n, n // 3), (n, n - 1))


def _causal_input(subject: Subject, length: int) -> Tensor:
    if not subject.causal:
        raise NotApplicableError("the model reads both directions")
    return subject.draw(1, length)


@check("outputs change when later tokens change", _split)
def future(subject: Subject, length: int = 2, seen: int = 1) -> Outputs:
    """Replace all tokens after the first `seen`."""
    x = _causal_input(subject, length)
    other = torch.cat([x[:, :seen], subject.draw(1, length, seed=1)[:, seen:]], 1)
    return subject.run(other)[:, :seen], subject.run(x)[:, :seen]


@check("a text's first tokens have other outputs than the same tokens in front of more", _split)
def prefix(subject: Subject, length: int = 2, seen: int = 1) -> Outputs:
    """Remove all tokens after the first `seen`."""
    x = _causal_input(subject, length)
    return subject.run(x[:, :seen]), subject.run(x)[:, :seen]


@check("outputs have gradients by later tokens", _split, gradients=True)
def future_gradients(subject: Subject, length: int = 2, seen: int = 1) -> Gap:
    """Differentiate the first `seen` outputs by the vectors of all tokens; later ones must be exactly 0."""
    leaves, output = _by_vectors(subject, _causal_input(subject, length))
    outputs = output[:, :seen].float().sin().sum()
    slopes = torch.autograd.grad(outputs, leaves, allow_unused=True) if leaves else ()
    slopes = [slope for slope in slopes if slope is not None]
    if not any(slope.any() for slope in slopes):
        raise NotApplicableError("no table of tokens was found to differentiate by")
    past = max(float(slope[:, :seen].abs().max()) for slope in slopes)
    later = max(float(slope[:, seen:].abs().max()) for slope in slopes)
    return Gap(later / max(past, 1e-30), 0.0)


def _by_vectors(subject: Subject, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the vectors of the tokens as leaves of the graph, and the outputs."""
    if x.is_floating_point():
        return [x.requires_grad_()], subject.run(x)
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        ids = arguments[0] if arguments else None
        if isinstance(output, Tensor) and isinstance(ids, Tensor) and torch.equal(ids, x):
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]
        return None

    with subject.hooked(cut):
        return leaves, subject.run(x)


@check("documents packed in a row have other outputs than in separate rows", lambda n: [(n // 3, n - n // 3)])
def packing(subject: Subject, first: int = 1, second: int = 1) -> Outputs:
    """Pack two documents by `document_ids`."""
    subject.needs("document_ids")
    x = subject.draw(1, first + second)
    documents = torch.tensor([[0] * first + [1] * second], device=x.device)
    parts = [
        subject.run(part, document_ids=documents[:, : part.shape[1]] * 0)
        for part in x.split([first, second], 1)
    ]
    return subject.run(x, document_ids=documents), torch.cat(parts, 1)


@check("a row's outputs change when other rows change", lambda n: [(3, n // 2)], whole_rows=True)
def rows(subject: Subject, rows: int = 2, length: int = 1) -> Outputs:
    """Replace all rows except the last: capacity is often taken by the first rows."""
    x, other = subject.draw(rows, length), subject.draw(rows, length, seed=1)
    other[-1] = x[-1]
    return subject.run(other)[-1], subject.run(x)[-1]


@check("a row's outputs differ from its outputs in a batch of 1", lambda n: [(3, n // 2)], whole_rows=True)
def batch_size(subject: Subject, rows: int = 2, length: int = 1) -> Outputs:
    """Compare each row with itself in a batch of 1."""
    x = subject.draw(rows, length)
    return subject.run(x), torch.cat([subject.run(row.unsqueeze(0)) for row in x])


@check(
    "equal rows have different outputs: experts leak between rows", lambda n: [(6, n // 2)], whole_rows=True
)
def experts(subject: Subject, rows: int = 2, length: int = 1) -> Outputs:
    """Repeat a row, so that all rows choose the same experts, and compare with a batch of 1."""
    names = (f"{name} {type(part).__name__}".lower() for name, part in subject.module.named_modules())
    if not any(word in name for name in names for word in ("expert", "router", "moe")):
        raise NotApplicableError("the model has no part with expert, router or moe in its name")
    x = subject.draw(1, length)
    output = subject.run(x.repeat(rows, *[1] * (x.dim() - 1)))
    return output, subject.run(x).expand_as(output)


TIMES = 4
"""How many times the error of the reference a half precision may have."""


@check(
    "gradients accumulated over the rows of a batch differ from those of the batch",
    lambda n: [(3, n // 2 + 2)],
    gradients=True,
)
def accumulation(subject: Subject, rows: int = 2, length: int = 3) -> Gap:
    """Give rows different numbers of labels.

    A model that accepts `num_items_in_batch` divides the sum of its losses by that number. The mean loss of
    other models is weighted by the row's share of the labels.
    """
    subject.needs("labels")
    x = subject.draw(rows, length)
    with torch.no_grad():
        labels = x.clone() if x.is_floating_point() else x % subject.run(x).shape[-1]
    labels[:, 0] = -100  # has no prediction in a model that shifts labels
    for row in range(rows):
        labels[row, 2 + row * (length - 2) // rows + (row == 0) * length :] = -100
    counts = (labels != -100).flatten(1).sum(1)
    total = counts.sum()
    scales = "num_items_in_batch" in subject.accepts

    def slopes(part: slice, share: Tensor) -> Tensor:
        extra = {"num_items_in_batch": total} if scales else {}
        loss = subject.run(x[part], labels=labels[part], **extra)
        return torch.cat([slope.flatten() for slope in subject.gradients(loss if scales else loss * share)])

    whole = slopes(slice(None), total / total)
    parts = torch.stack([slopes(slice(row, row + 1), counts[row] / total) for row in range(rows)])
    return Gap(distance(parts.sum(0), whole), 8 * subject.rounding)


@check(
    "outputs differ for the same seed in training mode, or for two seeds in evaluation mode",
    lambda n: [(2, n // 2)],
    whole_rows=True,
)
def seed(subject: Subject, rows: int = 1, length: int = 1) -> Gap:
    """Call twice in training mode with a seed, and in evaluation mode with two seeds."""
    x, outputs = subject.draw(rows, length), []
    for training, number in ((True, 5), (True, 5), (False, 5), (False, 6)):
        copied = dataclasses.replace(subject, module=copy.deepcopy(subject.module).train(training))
        with torch.random.fork_rng():
            torch.manual_seed(number)
            random.seed(number)
            outputs.append(copied.run(x))
    return Gap(max(distance(*outputs[:2]), distance(*outputs[2:])), 0.0)


def _half(subject: Subject, length: int = 1, *, dtype: torch.dtype) -> Gap:
    """Return the error of the model in `dtype`, and `TIMES` the error of the reference as its limit.

    The exact model has the rounded weights in float64. The reference is the greater of two errors: of plain
    attention in `dtype`, if the model has a plain form, and of the exact model with the output of every
    module rounded to `dtype`, the least that storing results in `dtype` costs. Errors are medians over the
    tokens, because rounding may exchange the experts of a few tokens.
    """
    half = subject.at(dtype)
    exact, x = half.at(torch.float64), half.draw(2, length)
    try:
        actual, expected = half.run(x), exact.run(x)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotApplicableError(f"the model does not run in {dtype} and float64: {error}") from error

    def rounded(module: nn.Module, arguments: object, output: object) -> object:
        if isinstance(output, Tensor) and output.is_floating_point():
            return output.to(dtype).to(output.dtype)
        return None

    with exact.hooked(rounded):
        errors = [_typical(exact.run(x), expected)]
    if subject.plain is not None:
        plain = dataclasses.replace(half, module=subject.plain(copy.deepcopy(half.module)))
        errors.append(_typical(plain.run(x), expected))
    limit = TIMES * max(*errors, torch.finfo(dtype).eps)
    return Gap(_typical(actual, expected), limit, f"the reference has {limit / TIMES:.1e}")


for _dtype in (torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    check(
        f"{_name} has a larger error than plain attention in {_name}",
        lambda n: [(n,)],
        name=_name,
        whole_rows=True,
    )(functools.partial(_half, dtype=_dtype))


def _typical(actual: Tensor, expected: Tensor) -> float:
    """Return the median over tokens of the largest error, relative to the largest entry."""
    if not bool(actual[expected.isfinite()].isfinite().all()):
        return float("inf")
    errors = (actual.double() - expected.double()).nan_to_num(0, 0, 0).abs().amax(-1)
    return float(errors.median() / expected.double().nan_to_num(0, 0, 0).abs().max().clamp(min=1e-30))


@check("a saved and loaded model has other outputs", lambda n: [(n // 2,)], whole_rows=True)
def saving(subject: Subject, length: int = 1) -> Gap:
    """Save into a folder and load; without functions for it, load the state dict into a model of zeros."""
    x = subject.draw(2, length)
    with tempfile.TemporaryDirectory() as folder:
        if subject.save is not None:
            loaded = subject.save(subject.module, Path(folder)).to(x.device)
        else:
            path = Path(folder, "model.pt")
            torch.save(subject.module.state_dict(), path)
            loaded = copy.deepcopy(subject.module)
            for parameter in loaded.parameters():
                parameter.zero_()
            loaded.load_state_dict(torch.load(path, weights_only=True))
    return Gap(distance(dataclasses.replace(subject, module=loaded).run(x), subject.run(x)), 0.0)
