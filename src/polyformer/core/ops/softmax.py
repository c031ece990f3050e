"""The softmax of attention: rows without visible keys give zeros, and a tap records the probabilities."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from polyformer.core.instrumentation import Editor, Recorder

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
    probabilities, lse = shares(scores)
    probabilities = edited_weights.edit(probabilities)
    record(probabilities)
    return probabilities, lse


def shares(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the last axis [..., T] and its log-sum-exp [...], which nothing records.

    If all entries are minus infinity, both have a gradient of zero. The softmax is not exp(scores - lse):
    rounding a large `lse` would multiply all of a row's probabilities by the same wrong factor.
    """
    if not scores.shape[-1]:
        return scores, safe_logsumexp(scores)
    weights, total, top = _weights(scores)
    return weights / total.masked_fill(total == 0, 1.0), _log(total, top)


def safe_logsumexp(scores: Tensor) -> Tensor:
    """Return the log-sum-exp over the last axis, with a zero gradient if all entries are minus infinity."""
    if not scores.shape[-1]:
        return scores.sum(-1) - torch.inf
    _, total, top = _weights(scores)
    return _log(total, top)


def _weights(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(scores - top) [..., T], the sum of these [..., 1], and the largest score, `top` [..., 1]."""
    top = scores.detach().amax(-1, keepdim=True)
    # A row of minus infinity: 0 instead keeps exp(-inf) = 0 and its gradient 0.
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    return weights, weights.sum(-1, keepdim=True), top


def _log(total: Tensor, top: Tensor) -> Tensor:
    """Return log(total) + top [...] of tensors [..., 1]; minus infinity for a sum of 0."""
    empty = total == 0
    lse = torch.log(total.masked_fill(empty, 1.0)).masked_fill(empty, -torch.inf) + top
    return lse.squeeze(-1)


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
