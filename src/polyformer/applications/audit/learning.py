"""Accumulated gradients of parts of a batch equal the gradients of the batch."""

import torch
from torch import Tensor

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import Subject, distance


@check(
    "accumulation",
    "gradients accumulated over the rows of a batch differ from those of the batch",
    lambda n: [{"rows": 3, "length": n // 2 + 2}],
    {"rows": 2, "length": 3},
)
def accumulation(subject: Subject, rows: int, length: int) -> Gap:
    """Give rows different numbers of labels.

    A model that accepts `num_items_in_batch` divides the sum of its losses by that number. The mean loss of
    other models is weighted by the row's share of the labels.
    """
    subject.needs("labels")
    x = subject.draw(rows, length)
    with torch.no_grad():
        labels = x % subject.run(x).shape[-1] if not x.is_floating_point() else x
    labels = labels.clone()
    labels[:, 0] = -100  # has no prediction in a model that shifts labels
    for row in range(rows):
        labels[row, 2 + row * (length - 2) // rows + (row == 0) * length :] = -100
    counts = (labels != -100).flatten(1).sum(1)
    total = counts.sum()
    scales = "num_items_in_batch" in subject.accepts

    def slopes(part: slice, share: Tensor) -> Tensor:
        extra = {"num_items_in_batch": total} if scales else {}
        subject.module.zero_grad()
        loss = subject.run(x[part], labels=labels[part], **extra)
        (loss if scales else loss * share).backward()
        grads = [p.grad.flatten() for p in subject.module.parameters() if p.grad is not None]
        subject.module.zero_grad()
        return torch.cat(grads)

    whole = slopes(slice(None), total / total)
    parts = sum(slopes(slice(row, row + 1), counts[row] / total) for row in range(rows))
    assert isinstance(parts, Tensor)
    return Gap(distance(parts, whole), 8 * subject.rounding)
