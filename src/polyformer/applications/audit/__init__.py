"""Audits: the contracts that every member of this library passes, applied to any model.

    report = polyformer.audit(model, call=None)
    print(report)                       # sentences, figures, smallest inputs, lines that repeat them
    measure(model, "left padding", length=1, left=1)

A check is a function from a model and sizes to a relative difference that should be 0. A difference that
rounding cannot explain is a finding. A report is printed as text or JSON, and decides an exit status.
Deviations may be accepted in a file, with their reasons.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyformer.applications.audit import contracts  # they register their checks
from polyformer.applications.audit.adaptors import load_model, subjects
from polyformer.applications.audit.checks import (
    ABILITIES,
    CHECKS,
    Check,
    Gap,
    NotApplicableError,
    Subject,
    find,
)
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_bounded
from polyformer.core.modules import names_wrong_types
from polyformer.core.parsing import parse_yaml
from polyformer.core.ranges import YAML_BYTES

__all__ = [
    "ABILITIES",
    "CHECKS",
    "LABELS",
    "Gap",
    "Report",
    "Result",
    "Status",
    "Subject",
    "accepted_deviations",
    "audit",
    "measure",
]

Status = Literal["passed", "finding", "accepted", "not applicable"]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a check; `sentence` describes the finding, or says why the check does not apply.

    figure, limit: the greatest relative difference, and the greatest that rounding explains. sizes: the
    smallest input of a finding. code: a line of Python that repeats the measurement.
    """

    check: str
    side: str
    status: Status
    sentence: str
    figure: float | None = None
    limit: float | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    code: str = ""

    @property
    def name(self) -> str:
        """The check, with the side of an encoder-decoder."""
        return f"{self.check} ({self.side})" if self.side else self.check

    @property
    def repetition(self) -> tuple[str, ...]:
        """The smallest input and the line of code of a finding; empty for other results."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        return (sizes, self.code) if self.status == "finding" else ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, infinity as a word."""
        fields = dataclasses.asdict(self)
        return fields | {
            name: str(fields[name])
            for name in ("figure", "limit")
            if fields[name] is not None and not math.isfinite(fields[name])
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of all checks of a model."""

    model: str
    results: Sequence[Result]

    def of(self, status: Status) -> list[Result]:
        """Return the results with a status."""
        return [result for result in self.results if result.status == status]

    @property
    def findings(self) -> list[Result]:
        """The findings that are not accepted."""
        return self.of("finding")

    @property
    def status(self) -> int:
        """The exit status: 1 with findings, else 0."""
        return int(bool(self.findings))

    @property
    def summary(self) -> str:
        """The numbers of results in a sentence."""
        counts = [f"{len(self.of(status))} {name}" for status, name in LABELS.items()]
        return f"{self.model}: {', '.join(counts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        results = [result.to_dict() for result in self.results]
        return {"model": self.model, "findings": len(self.findings), "results": results}

    def __str__(self) -> str:
        lines = [self.summary]
        for result in self.findings:
            sizes, code = result.repetition
            lines += ["", f"{result.name}: {result.sentence}", f"  smallest input: {sizes}", f"  {code}"]
        return "\n".join(lines)


LABELS: dict[Status, str] = {
    "passed": "passed",
    "finding": "findings",
    "accepted": "accepted",
    "not applicable": "not applicable",
}


def accepted_deviations(path: str | Path) -> dict[str, str]:
    """Read a YAML file of `check: reason`; raise `InputError` for unknown checks and missing reasons."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"--accept: no such file {path}")
    reasons = parse_yaml(read_bounded(path, YAML_BYTES).decode(), str(path))
    if not isinstance(reasons, dict):
        raise InputError(f"{path}: expected lines of `check: reason`, got {type(reasons).__name__}")
    return checked(reasons, str(path))


def checked(reasons: Mapping[Any, Any], where: str) -> dict[str, str]:
    """Return accepted deviations; raise `InputError` for unknown checks and missing reasons."""
    for name, reason in reasons.items():
        check = str(name).partition(" (")[0]
        if check not in CHECKS:
            raise unknown(f"{where}: check", check, CHECKS)
        if not isinstance(reason, str) or not reason.strip():
            raise InputError(f"{where}: {name}: expected a reason as text, got {quote(reason)}")
    return dict(reasons)


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
