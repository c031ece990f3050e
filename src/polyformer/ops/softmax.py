"""The one softmax of the library: rows that see nothing give zeros, and the single tap for looking inside."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_tap: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("attention_tap", default=None)


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


@contextlib.contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Collects the attention probabilities of every call inside, in order; `attend` then runs densely."""
    records: list[Tensor] = []
    token = _tap.set(records)
    try:
        yield records
    finally:
        _tap.reset(token)


def recording() -> bool:
    """Whether somebody is looking."""
    return _records() is not None


def record(probabilities: Tensor) -> None:
    """Shows `probabilities` [..., Tq, Tk] to whoever collects."""
    records = _records()
    if records is not None:
        records.append(probabilities.detach())


def amend(change: Callable[[Tensor], Tensor]) -> None:
    """Replaces the last record, where a part of that call was computed apart."""
    records = _records()
    if records:
        records[-1] = change(records[-1])


def _records() -> list[Tensor] | None:
    return None if torch.compiler.is_compiling() else _tap.get()  # a traced graph keeps no list
