"""Cross-entropy of a linear layer's output without ever holding all of its logits.

The loss over a vocabulary of V is the one place where a tensor [tokens, V] appears. Here the tokens pass in
chunks: from a chunk's logits follow its loss and, where gradients are wanted, those of the hidden states and
of the weights; then the logits are forgotten. Memory: one chunk; products: the same three.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from polyformer.core.labels import IGNORED, check_labels
from polyformer.ops.linear import input_gradient, linear, weight_gradient

CHUNK_ENTRIES = 1 << 24
"""Logits held at a time: 64 MiB in float32."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Mean over the labelled tokens of the cross-entropy of softmax(hidden weight^T + bias).

    Args:
        hidden: [..., E]. weight: [V, E]. bias: [V] or None.
        labels: [...] in 0..V-1, or -100 where nothing is predicted. With no label at all the loss is 0.
        smoothing: probability mass spread evenly over the vocabulary (Szegedy et al. 2016, section 7).

    Raises:
        InputError: labels of another shape, or outside the vocabulary.
    """
    check_labels(labels, hidden.shape[:-1], len(weight))
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if not torch.compiler.is_compiling():  # a masked language model predicts one token in seven
        chosen = labels != IGNORED
        hidden, labels = hidden[chosen], labels[chosen]
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, smoothing)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
    ) -> Tensor:
        """-sum_t log softmax(hidden_t weight^T + bias)[label_t] / count, and its gradients with it."""
        wanted = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
        with torch.autocast(hidden.device.type, enabled=False):
            count = (labels != IGNORED).sum().clamp_min(1)
            total, gradients = _chunks(hidden, weight, bias, labels, smoothing, wanted)
        ctx.save_for_backward(count, *gradients)  # type: ignore[arg-type] - None is fine
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]  # type: ignore[attr-defined]
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad_x = grad / count * (the gradient of the sum, computed by `forward`) for each x."""
        count, *gradients = ctx.saved_tensors  # type: ignore[attr-defined]
        # Divided by the count only here, where a scaled loss brings its factor: float16 ends at 6e-8.
        factor = grad / count
        dtypes = ctx.dtypes  # type: ignore[attr-defined]
        scaled = [
            None if gradient is None else (gradient.to(factor.dtype) * factor).to(dtype)
            for gradient, dtype in zip(gradients, dtypes)
        ]
        return scaled[0], scaled[1], scaled[2], None, None


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, wanted: list[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The summed loss, and its gradients with respect to hidden, weight and bias where wanted."""
    loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=loss.dtype) if wanted[1] else None
    grad_bias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=loss.dtype)
    matrix = weight.to(hidden.dtype)
    rows = max(1, CHUNK_ENTRIES // len(weight))
    for start in range(0, len(hidden), rows):
        part, label = hidden[start : start + rows], labels[start : start + rows]
        logits = linear(part, matrix).to(loss.dtype)
        if bias is not None:
            logits += bias
        total, slope = _chunk(logits, label, smoothing, gradient=any(wanted))
        loss += total
        if slope is None:
            continue
        slope = slope.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[start : start + rows] = input_gradient(slope, matrix)
        if grad_weight is not None:
            grad_weight += weight_gradient(slope, part)
        if grad_bias is not None:
            grad_bias += slope.sum(0)
    return loss, [grad_hidden, grad_weight, grad_bias]


def _chunk(logits: Tensor, labels: Tensor, smoothing: float, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The summed loss of one chunk, and its slope by the logits, which it overwrites."""
    labelled = labels != IGNORED
    index = labels.masked_fill(~labelled, 0).unsqueeze(1)
    lse = logits.logsumexp(1)
    loss = lse - (1 - smoothing) * logits.gather(1, index).squeeze(1)
    if smoothing:
        loss = loss - smoothing * logits.mean(1)
    total = loss.masked_fill(~labelled, 0.0).sum()
    if not gradient:
        return total, None
    slope = logits.sub_(lse.unsqueeze(1)).exp_()
    slope.scatter_add_(1, index, torch.full_like(index, 1, dtype=slope.dtype).mul_(smoothing - 1))
    if smoothing:
        slope -= smoothing / slope.shape[1]
    return total, slope.mul_(labelled.unsqueeze(1))
