"""Audits: the contracts that every member of this library passes, applied to any model.

    report = polyformer.audit(model, call=None)
    print(report)                       # sentences, figures, smallest inputs, lines that repeat them
    measure(model, "left padding", length=1, left=1)

A check is a function from a model and sizes to a relative difference that should be 0. A difference that
rounding cannot explain is a finding.
"""

from polyformer.applications.audit.audit import (
    LABELS,
    Report,
    Result,
    Status,
    accepted_deviations,
    audit,
    measure,
)
from polyformer.applications.audit.checks import ABILITIES, CHECKS, Gap, Subject

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
