"""Amount and content of padding change nothing, and a row of padding only is finite."""

import torch
from torch import Tensor

from polyformer.applications.audit.checks import Gap, check
from polyformer.applications.audit.subject import Subject, distance


def padded(
    subject: Subject, x: Tensor, left: int, right: int, seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return x between tokens of padding, and its mask [B, left + T + right].

    Padding is random by a seed; without a seed it is the id of padding, if there is any.
    """
    around = subject.draw(len(x), left + right, seed or 2) if left + right else x[:, :0]
    if seed is None and subject.pad is not None:
        around = torch.full_like(around, subject.pad)
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    mask = torch.nn.functional.pad(mask, (left, right))
    return torch.cat([around[:, :left], x, around[:, left:]], 1), mask


def _difference(subject: Subject, length: int, left: int, right: int) -> Gap:
    subject.needs("attention_mask")
    x = subject.draw(2, length)
    expected = subject.run(x, attention_mask=padded(subject, x, 0, 0)[1])
    ids, mask = padded(subject, x, left, right)
    actual = _of_text(subject, subject.run(ids, attention_mask=mask), left, length)
    return Gap(distance(actual, expected), subject.rounding)


def _of_text(subject: Subject, output: Tensor, left: int, length: int) -> Tensor:
    """Return the outputs of the text's tokens, or of its row."""
    return output[:, left : left + length] if subject.per_token else output


@check(
    "left padding",
    "padding before a text changes its outputs",
    lambda n: [{"length": n // 2, "left": 3}],
    {"length": 1, "left": 1},
    whole_rows=True,
)
@torch.no_grad()
def left_padding(subject: Subject, length: int, left: int) -> Gap:
    """Compare with the text without padding."""
    return _difference(subject, length, left, 0)


@check(
    "right padding",
    "padding after a text changes its outputs",
    lambda n: [{"length": n // 2, "right": 3}],
    {"length": 1, "right": 1},
    whole_rows=True,
)
@torch.no_grad()
def right_padding(subject: Subject, length: int, right: int) -> Gap:
    """Compare with the text without padding."""
    return _difference(subject, length, 0, right)


@check(
    "padding content",
    "the ids at padding change the outputs of the text",
    lambda n: [{"length": n // 2, "left": 3, "right": 2}],
    {"length": 1, "left": 0, "right": 0},
    whole_rows=True,
)
@torch.no_grad()
def padding_content(subject: Subject, length: int, left: int, right: int) -> Gap:
    """Compare two texts that differ at padding only."""
    subject.needs("attention_mask")
    x = subject.draw(2, length)
    outputs = []
    for seed in (None, 3):
        ids, mask = padded(subject, x, left, right, seed)
        outputs.append(_of_text(subject, subject.run(ids, attention_mask=mask), left, length))
    return Gap(distance(*outputs), subject.rounding)


@check(
    "empty row",
    "a row of padding only has outputs or gradients that are not finite",
    lambda n: [{"length": n // 2}],
    {"length": 1},
    whole_rows=True,
)
def empty_row(subject: Subject, length: int) -> Gap:
    """Mask the first of two rows; count outputs and gradients that are not finite, and compare the other."""
    subject.needs("attention_mask")
    x = subject.draw(2, length)
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    mask[0] = 0
    output = subject.run(x, attention_mask=mask)
    subject.module.zero_grad()
    output.float().sin().sum().backward()
    slopes = [p.grad for p in subject.module.parameters() if p.grad is not None]
    bad = sum(int((~tensor.isfinite()).sum()) for tensor in (output, *slopes))
    subject.module.zero_grad()
    if bad:
        return Gap(bad, 0, f"{bad} entries are not finite")
    alone = subject.run(x[1:], attention_mask=mask[1:])
    return Gap(
        distance(output[1:], alone), subject.rounding, "compares the other row with itself in a batch of 1"
    )
