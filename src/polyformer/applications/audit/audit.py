"""`audit`: run all checks on a model; `measure`: repeat one of them."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from polyformer.applications.audit import caches, independence, numbers, padding  # noqa: F401
from polyformer.applications.audit.adaptors import load_model, subjects
from polyformer.applications.audit.checks import CHECKS, Check, Gap, find
from polyformer.applications.audit.report import Report, Result, checked
from polyformer.applications.audit.subject import NotApplicableError, Subject
from polyformer.core.argument_types import names_wrong_types
from polyformer.core.errors import quote, unknown

ACCURATE = torch.float32, torch.float64


@names_wrong_types
def audit(
    model: nn.Module | str,
    call: Callable[..., Any] | None = None,
    *,
    checks: Sequence[str] | None = None,
    accept: Mapping[str, str] | None = None,
    progress: Callable[[Result], None] = lambda result: None,
    **options: Any,
) -> Report:
    """Run the checks of `CHECKS` on a model and return a `Report`.

    Args:
        model: a model of this library or of transformers, in memory or by its folder or name; or any module.
        call: how to call a module, `call(module, x, **named)`; by default as `module(x, **named)`. Its
            parameters with names of `subject.ABILITIES` are its accepted arguments, see `subject.Subject`.
        checks: names of checks; by default all.
        accept: reasons for accepted deviations, by the names of checks.
        progress: receives each result.
        options: of a module: `vocab_size` or `width` (of vectors as input) or `sample`, `causal` (True),
            `length` (12 tokens), `reorder`, and a `name` for the lines of code.

    Raises `InputError` for unknown checks and models. The model is not changed; one in half precision is
    audited in float32.
    """
    for name in checks or ():
        if name not in CHECKS:
            raise unknown("checks", name, CHECKS)
    reasons = checked(accept or {}, "accept")
    results = []
    parts = _opened(model, call, options)
    for subject in parts:
        for check in CHECKS.values():
            if checks is not None and check.name not in checks:
                continue
            result = _result(check, subject, reasons)
            # A second side repeats only what concerns its input.
            if result.status == "not applicable" and subject is not parts[0]:
                continue
            results.append(result)
            progress(result)
    return Report(parts[0].name, results)


def measure(
    model: nn.Module | str, check: str, call: Callable[..., Any] | None = None, side: str = "", **sizes: Any
) -> Gap:
    """Return the difference that a check measures on an input of some sizes, as a finding's line does.

    sizes: the sizes of the check, and options of `audit`.
    """
    if check not in CHECKS:
        raise unknown("check", check, CHECKS)
    mine = {name: sizes.pop(name) for name in CHECKS[check].least if name in sizes}
    for subject in _opened(model, call, sizes):
        if subject.side == side:
            return CHECKS[check](subject, mine)
    raise unknown("side", side, ["", "target", "source"])


def _opened(model: Any, call: Any, options: dict[str, Any]) -> list[Subject]:
    """Return the subjects of a copy of a model, in evaluation mode and in float32 or float64."""
    if isinstance(model, str):
        options = {"name": model, **options}
        model = load_model(model, torch.device("cpu"))
    else:
        model = copy.deepcopy(model)
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    model = model.eval() if types <= set(ACCURATE) else model.eval().float()
    return subjects(model, call, **options)


def _result(check: Check, subject: Subject, reasons: Mapping[str, str]) -> Result:
    try:
        sizes, gap = find(check, subject)
    except NotApplicableError as reason:
        return Result(check.name, subject.side, "not applicable", " ".join(str(reason).split()))
    result = Result(check.name, subject.side, "passed", "", gap.figure, gap.limit, sizes)
    if not gap.exceeds:
        return result
    note = f"; {gap.note}" if gap.note else ""
    figures = f"relative difference {gap.figure:.1e}, rounding explains {gap.limit:.1e}"
    sentence = f"{check.sentence} ({figures}{note})"
    model = repr(subject.name) if subject.name != "model" else "model"
    side = f", side={quote(subject.side)}" if subject.side else ""
    values = "".join(f", {name}={size}" for name, size in sizes.items())
    code = f"polyformer.applications.audit.measure({model}, {check.name!r}{side}{values})"
    reason = reasons.get(result.name, reasons.get(check.name))
    if reason is not None:
        sentence = f"{sentence}; accepted: {reason}"
    status = "finding" if reason is None else "accepted"
    return dataclasses.replace(result, status=status, sentence=sentence, code=code)
