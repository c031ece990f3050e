"""A seed repeats, half precisions are as exact as they can be, and a saved model is the same model."""

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
    "seed",
    "outputs differ for the same seed in training mode, or for two seeds in evaluation mode",
    lambda n: [{"rows": 2, "length": n // 2}],
    {"rows": 1, "length": 1},
    whole_rows=True,
)
@torch.no_grad()
def seed(subject: Subject, rows: int, length: int) -> Gap:
    """Call twice in training mode with a seed, and in evaluation mode with two seeds."""
    x, outputs = subject.draw(rows, length), []
    for training, number in ((True, 5), (True, 5), (False, 5), (False, 6)):
        copied = dataclasses.replace(subject, module=copy.deepcopy(subject.module).train(training))
        with torch.random.fork_rng():
            torch.manual_seed(number)
            random.seed(number)
            outputs.append(copied.run(x))
    worst = max(distance(*outputs[:2]), distance(*outputs[2:]))
    return Gap(worst, 0.0)


@torch.no_grad()
def _half(subject: Subject, length: int, *, dtype: torch.dtype) -> Gap:
    """Return the error of the model in `dtype`, and `TIMES` the error of the reference as its limit.

    The exact model has the rounded weights in float64. The reference is the greater of two errors: of plain
    attention in `dtype`, if the model has a plain form, and of the exact model with the output of every
    module rounded to `dtype`, the least that storing results in `dtype` costs. Errors are medians over the
    tokens, because rounding may exchange the experts of a few tokens.
    """
    x = subject.draw(2, length)
    x = x.to(dtype) if x.is_floating_point() else x
    half = subject.at(dtype)
    exact = half.at(torch.float64)
    try:
        actual, expected = _run(half, x), _run(exact, x)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotApplicableError(f"the model does not run in {dtype} and float64: {error}") from error
    errors = [_typical(_rounded(exact, x, dtype), expected)]
    if subject.plain is not None:
        plain = dataclasses.replace(half, module=subject.plain(copy.deepcopy(half.module)))
        errors.append(_typical(_run(plain, x), expected))
    limit = TIMES * max(*errors, torch.finfo(dtype).eps)
    return Gap(_typical(actual, expected), limit, f"the reference has {limit / TIMES:.1e}")


for _dtype in (torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    check(
        _name,
        f"{_name} has a larger error than plain attention in {_name}",
        lambda n: [{"length": n}],
        {"length": 1},
        whole_rows=True,
    )(functools.partial(_half, dtype=_dtype))


def _typical(actual: Tensor, expected: Tensor) -> float:
    """Return the median over tokens of the largest error, relative to the largest entry."""
    if not bool(actual[expected.isfinite()].isfinite().all()):
        return float("inf")
    errors = (actual.double() - expected.double()).nan_to_num(0, 0, 0).abs().amax(-1)
    return float(errors.median() / expected.double().nan_to_num(0, 0, 0).abs().max().clamp(min=1e-30))


def _run(subject: Subject, x: Tensor) -> Tensor:
    return subject.run(x.to(subject.dtype) if x.is_floating_point() else x)


def _rounded(subject: Subject, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the outputs of the model with every module's output rounded to `dtype`."""

    def round_(module: nn.Module, arguments: object, output: object) -> object:
        if isinstance(output, Tensor) and output.is_floating_point():
            return output.to(dtype).to(output.dtype)
        return None

    hooks = [part.register_forward_hook(round_) for part in subject.module.modules()]
    try:
        return _run(subject, x)
    finally:
        for hook in hooks:
            hook.remove()


@check(
    "saving",
    "a saved and loaded model has other outputs",
    lambda n: [{"length": n // 2}],
    {"length": 1},
    whole_rows=True,
)
@torch.no_grad()
def saving(subject: Subject, length: int) -> Gap:
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
    twin = dataclasses.replace(subject, module=loaded)
    return Gap(distance(twin.run(x), subject.run(x)), 0.0)
