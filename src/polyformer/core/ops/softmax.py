"""The softmax of attention: rows without visible keys give zeros, and a tap records the probabilities."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyformer.core.editor import Editor
from polyformer.core.recorder import Recorder

_recorder: Recorder[Tensor] = Recorder("attention_tap")

edited_weights: Editor[Tensor] = Editor("edited_weights")
"""Replaces the probabilities [..., Tq, Tk] of every softmax; their log-sum-exp stays the same."""


def softmax(scores: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the softmax over the last axis and its log-sum-exp.

    Args:
        scores: [..., Tq, Tk].
        allowed: bool, broadcasts to `scores`; False is masked. A row without allowed keys gives zeros and
            a log-sum-exp of minus infinity, forward and backward, never NaN.

    Returns:
        probabilities [..., Tq, Tk] and log-sum-exp [..., Tq].
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = safe_logsumexp(scores)
    # An empty row has lse = -inf: shifting it by 0 instead keeps exp(-inf) = 0 and its gradient 0.
    probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    probabilities = edited_weights.edit(probabilities)
    record(probabilities)
    return probabilities, lse


def safe_logsumexp(scores: Tensor) -> Tensor:
    """Return the log-sum-exp over the last axis, with a zero gradient if all entries are minus infinity."""
    if scores.shape[-1] == 0:
        return scores.sum(-1) - torch.inf
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    total = torch.exp(scores - top).sum(-1)
    empty = total == 0
    return torch.log(total.masked_fill(empty, 1.0)).masked_fill(empty, -torch.inf) + top.squeeze(-1)


def recorded() -> AbstractContextManager[list[Tensor]]:
    """Collect the attention probabilities of every call inside, in order; `attend` then runs densely."""
    return _recorder.collect()


def recording() -> bool:
    """Return whether probabilities are being collected."""
    return _recorder.records is not None


def record(probabilities: Tensor) -> None:
    """Pass `probabilities` [..., Tq, Tk] to the collector, if any."""
    _recorder.record(probabilities.detach())


def amend(change: Callable[[Tensor], Tensor]) -> None:
    """Replace the last record, if a part of that call was computed separately."""
    records = _recorder.records
    if records:
        records[-1] = change(records[-1])
