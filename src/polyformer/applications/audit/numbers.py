"""Seeds repeat, half precisions are as exact as they can be, saved models are equal, gradients accumulate."""

import copy
import dataclasses
import functools
import random
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import NotApplicableError, Subject, distance

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
