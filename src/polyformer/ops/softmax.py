"""The one softmax of the library: rows that see nothing give zeros, and the single tap for looking inside."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyformer.core.tap import Tap

_tap: Tap[Tensor] = Tap("attention_tap")


def softmax(scores: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """softmax over the last axis and its log-sum-exp.

    Args:
        scores: [..., Tq, Tk].
        allowed: bool, broadcasts to `scores`; False is left out. A row with nothing allowed gives zeros and
            a log-sum-exp of minus infinity, forward and backward, never NaN.

    Returns:
        probabilities [..., Tq, Tk] and log-sum-exp [..., Tq].
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = safe_logsumexp(scores)
    # A row of nothing has lse = -inf: shifting it by 0 instead keeps exp(-inf) = 0 and its gradient 0.
    probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    record(probabilities)
    return probabilities, lse


def safe_logsumexp(scores: Tensor) -> Tensor:
    """log-sum-exp over the last axis, with a zero gradient where every entry is minus infinity."""
    if scores.shape[-1] == 0:
        return scores.sum(-1) - torch.inf
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.exp(scores - top).sum(-1)
    empty = total == 0
    return torch.log(total.masked_fill(empty, 1.0)).masked_fill(empty, -torch.inf) + top.squeeze(-1)


def recorded() -> AbstractContextManager[list[Tensor]]:
    """Collects the attention probabilities of every call inside, in order; `attend` then runs densely."""
    return _tap.collected()


def recording() -> bool:
    """Whether somebody is looking."""
    return _tap.records is not None


def record(probabilities: Tensor) -> None:
    """Shows `probabilities` [..., Tq, Tk] to whoever collects."""
    _tap.show(probabilities.detach())


def amend(change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the last record, where a part of that call was computed apart."""
    records = _tap.records
    if records:
        records[-1] = change(records[-1])
