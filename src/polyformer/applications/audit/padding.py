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


def _of_text(subject: Subject, length: int, left: int = 0, right: int = 0, seed: int | None = None) -> Tensor:
    """Return the outputs of a text's tokens, or of its row, between tokens of padding."""
    subject.needs("attention_mask")
    ids, mask = padded(subject, subject.draw(2, length), left, right, seed)
    output = subject.run(ids, attention_mask=mask)
    return output[:, left : left + length] if subject.per_token else output


@check("padding before a text changes its outputs", lambda n: [(n // 2, 3)], whole_rows=True)
def left_padding(subject: Subject, length: int = 1, left: int = 1) -> tuple[Tensor, Tensor]:
    """Compare with the text without padding."""
    return _of_text(subject, length, left), _of_text(subject, length)


@check("padding after a text changes its outputs", lambda n: [(n // 2, 3)], whole_rows=True)
def right_padding(subject: Subject, length: int = 1, right: int = 1) -> tuple[Tensor, Tensor]:
    """Compare with the text without padding."""
    return _of_text(subject, length, 0, right), _of_text(subject, length)


@check("the ids at padding change the outputs of the text", lambda n: [(n // 2, 3, 2)], whole_rows=True)
def padding_content(
    subject: Subject, length: int = 1, left: int = 0, right: int = 0
) -> tuple[Tensor, Tensor]:
    """Compare two texts that differ at padding only."""
    return _of_text(subject, length, left, right), _of_text(subject, length, left, right, seed=3)


@check(
    "a row of padding only has outputs or gradients that are not finite",
    lambda n: [(n // 2,)],
    whole_rows=True,
    gradients=True,
)
def empty_row(subject: Subject, length: int = 1) -> Gap:
    """Mask the first of two rows; count outputs and gradients that are not finite, and compare the other."""
    subject.needs("attention_mask")
    x = subject.draw(2, length)
    mask = torch.ones(x.shape[:2], dtype=torch.long, device=x.device)
    mask[0] = 0
    output = subject.run(x, attention_mask=mask)
    slopes = subject.gradients(output.float().sin().sum())
    if bad := sum(int((~tensor.isfinite()).sum()) for tensor in (output, *slopes)):
        return Gap(bad, 0, f"{bad} entries are not finite")
    gap = distance(output[1:], subject.run(x[1:], attention_mask=mask[1:]))
    return Gap(gap, subject.rounding, "compares the other row with itself in a batch of 1")
