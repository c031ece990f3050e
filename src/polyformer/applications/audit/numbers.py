"""A seed repeats, half precisions are as exact as they can be, and a saved model is the same model."""

import copy
import dataclasses
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
    "a call in training mode with the same seed has other outputs",
    lambda n: [{"rows": 2, "length": n // 2}],
    {"rows": 1, "length": 1},
    whole_rows=True,
)
@torch.no_grad()
def seed(subject: Subject, rows: int, length: int) -> Gap:
    """Call twice in training mode, with dropout, and twice in evaluation mode without a seed."""
    x, worst = subject.draw(rows, length), 0.0
    for mode in (True, False):
        outputs = []
        for _ in range(2):
            repeated = dataclasses.replace(subject, module=copy.deepcopy(subject.module).train(mode))
            with torch.random.fork_rng():
                state = random.getstate()
                if mode:
                    torch.manual_seed(5)
                    random.seed(5)
                outputs.append(repeated.run(x))
                random.setstate(state)
        worst = max(worst, distance(*outputs))
    return Gap(worst, 0.0)


@check(
    "bfloat16",
    "bfloat16 has a larger error than plain attention in bfloat16",
    lambda n: [{"length": n}],
    {"length": 1},
    whole_rows=True,
)
def bfloat16(subject: Subject, length: int) -> Gap:
    """Compare with float64, as `_half` explains."""
    return _half(subject, length, torch.bfloat16)


@check(
    "float16",
    "float16 has a larger error than plain attention in float16",
    lambda n: [{"length": n}],
    {"length": 1},
    whole_rows=True,
)
def float16(subject: Subject, length: int) -> Gap:
    """Compare with float64, as `_half` explains."""
    return _half(subject, length, torch.float16)


@torch.no_grad()
def _half(subject: Subject, length: int, dtype: torch.dtype) -> Gap:
    """Return the error of the model in `dtype` relative to `TIMES` that of the reference.

    The exact model has the rounded weights in float64. The reference is the greater of two errors: of plain
    attention in `dtype`, if the model has a plain form, and of the exact model with the output of every
    module rounded to `dtype`, the least that storing results in `dtype` costs.
    """
    x = subject.draw(2, length)
    x = x.to(dtype) if x.is_floating_point() else x
    half = subject.at(dtype)
    try:
        exact = half.at(torch.float64)
        expected = _run(exact, x)
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotApplicableError(f"the model does not run in float64: {error}") from error
    errors = [distance(_rounded(exact, x, dtype), expected)]
    if subject.plain is not None:
        plain = dataclasses.replace(half, module=subject.plain(copy.deepcopy(half.module)))
        errors.append(distance(_run(plain, x), expected))
    limit = TIMES * max(*errors, torch.finfo(dtype).eps)
    return Gap(distance(_run(half, x), expected), limit, f"the reference has {limit / TIMES:.1e}")


def _run(subject: Subject, x: Tensor) -> Tensor:
    return subject.run(x.to(subject.dtype) if x.is_floating_point() else x)


def _rounded(subject: Subject, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the outputs with those of every module rounded to `dtype`."""

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
