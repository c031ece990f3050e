"""Documents packed in a row have the outputs that they have in separate rows."""

import torch

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import Subject, distance


@check(
    "packing",
    "documents packed in a row have other outputs than in separate rows",
    lambda n: [{"first": n // 3, "second": n - n // 3}],
    {"first": 1, "second": 1},
)
@torch.no_grad()
def packing(subject: Subject, first: int, second: int) -> Gap:
    """Pack two documents by `document_ids`."""
    subject.needs("document_ids")
    x = subject.draw(1, first + second)
    documents = torch.tensor([[0] * first + [1] * second], device=x.device)
    parts = [
        subject.run(part, document_ids=documents[:, : part.shape[1]] * 0)
        for part in x.split([first, second], 1)
    ]
    return Gap(distance(subject.run(x, document_ids=documents), torch.cat(parts, 1)), subject.rounding)
