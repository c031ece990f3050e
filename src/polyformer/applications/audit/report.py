"""The results of an audit: as text, as JSON, and as an exit status; and the deviations that are accepted."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from polyformer.applications.audit.checks import CHECKS
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_bounded
from polyformer.core.parsing import parse_yaml
from polyformer.core.ranges import YAML_BYTES

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
