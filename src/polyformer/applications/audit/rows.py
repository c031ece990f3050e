"""Rows are independent of each other, of the batch size and of the load of experts."""

import torch

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import NotApplicableError, Subject, distance

SMALLEST = {"rows": 2, "length": 1}


@check(
    "rows",
    "a row's outputs change when other rows change",
    lambda n: [{"rows": 3, "length": n // 2}],
    SMALLEST,
    whole_rows=True,
)
@torch.no_grad()
def rows_apart(subject: Subject, rows: int, length: int) -> Gap:
    """Replace all rows except the last: capacity is often taken by the first rows."""
    x, other = subject.draw(rows, length), subject.draw(rows, length, seed=1)
    other[-1] = x[-1]
    return Gap(distance(subject.run(other)[-1], subject.run(x)[-1]), subject.rounding)


@check(
    "batch size",
    "a row's outputs differ from its outputs in a batch of 1",
    lambda n: [{"rows": 3, "length": n // 2}],
    SMALLEST,
    whole_rows=True,
)
@torch.no_grad()
def batch_size(subject: Subject, rows: int, length: int) -> Gap:
    """Compare each row with itself in a batch of 1."""
    x = subject.draw(rows, length)
    single = torch.cat([subject.run(row.unsqueeze(0)) for row in x])
    return Gap(distance(subject.run(x), single), subject.rounding)


@check(
    "experts",
    "equal rows have different outputs: experts leak between rows",
    lambda n: [{"rows": 6, "length": n // 2}],
    SMALLEST,
    whole_rows=True,
)
@torch.no_grad()
def experts(subject: Subject, rows: int, length: int) -> Gap:
    """Repeat a row, so that all rows choose the same experts, and compare with a batch of 1."""
    names = (f"{name} {type(part).__name__}".lower() for name, part in subject.module.named_modules())
    if not any(word in name for name in names for word in ("expert", "router", "moe")):
        raise NotApplicableError("the model has no part with expert, router or moe in its name")
    x = subject.draw(1, length)
    single = subject.run(x)
    output = subject.run(x.repeat(rows, *[1] * (x.dim() - 1)))
    return Gap(distance(output, single.expand_as(output)), subject.rounding)
