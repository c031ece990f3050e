"""Cross-entropy of a linear layer's output without ever holding all of its logits.

The loss over a vocabulary of V is the one place where a tensor [tokens, V] appears. Here the tokens pass in
chunks: from a chunk's logits follow its loss and, where gradients are wanted, those of the hidden states and
of the weights; then the logits are forgotten. Memory: one chunk; products: the same three.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from polyformer.core.labels import IGNORED, check_labels
from polyformer.ops.linear import input_gradient, linear, weight_gradient
from polyformer.ops.precision import without_autocast
from polyformer.ops.product_ways import ROW_STEP

CHUNK_ENTRIES = 1 << 25
"""Logits held at a time, 128 MiB in float32, or twice as many as the weights have entries where those are
more: their gradient is held in any case. A bound of memory, whatever the processor."""


class Rows(Protocol):
    """Which of the `vocab` rows of weight and bias a process has, `most` at the most, where several have some
    each, and the same hidden states and labels: `polyformer.parallel.vocabulary`."""

    vocab: int
    most: int

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where among its rows each of `ids` lies, 0 where it does not, and whether it does."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all processes' x, number by number, in the memory of x."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum of all processes' x, in the memory of x."""
        ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float = 0.0,
    rows: Rows | None = None,
) -> Tensor:
    """Mean over the labelled tokens of the cross-entropy of softmax(hidden weight^T + bias).

    Args:
        hidden: [..., E]. weight: [V, E]. bias: [V] or None.
        labels: [...] in 0..V-1, or -100 where nothing is predicted. With no label at all the loss is 0.
        smoothing: probability mass spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
        rows: where weight and bias are these rows of all, of which other processes have the rest.

    Raises:
        InputError: labels of another shape, or outside the vocabulary.
    """
    check_labels(labels, hidden.shape[:-1], len(weight) if rows is None else rows.vocab)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    tokens = None
    if not torch.compiler.is_compiling():  # a masked language model predicts one token in seven
        tokens = (labels != IGNORED).nonzero().squeeze(1)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, tokens, smoothing, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        tokens: Tensor | None,
        smoothing: float,
        rows: Rows | None,
    ) -> Tensor:
        """-sum_t log softmax(hidden_t weight^T + bias)[label_t] / count, and its gradients with it."""
        wanted = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
        with without_autocast(hidden):
            count = (labels != IGNORED).sum().clamp_min(1)
            ctx.tokens, ctx.shape, ctx.rows = tokens, hidden.shape, rows  # type: ignore[attr-defined]
            if tokens is not None:
                hidden, labels = _selected(hidden, labels, tokens)
            total, gradients = _chunks(hidden, weight, bias, labels, smoothing, wanted, rows)
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
            None if gradient is None else _scaled(gradient, factor).to(dtype)
            for gradient, dtype in zip(gradients, dtypes)
        ]
        tokens: Tensor | None = ctx.tokens  # type: ignore[attr-defined]
        rows: Rows | None = ctx.rows  # type: ignore[attr-defined]
        if scaled[0] is not None and rows is not None:  # so far of this process's logits alone
            scaled[0] = rows.total(scaled[0])
        if scaled[0] is not None and tokens is not None:
            zeros = scaled[0].new_zeros(ctx.shape)  # type: ignore[attr-defined]
            scaled[0] = zeros.index_copy_(0, tokens, scaled[0][: len(tokens)])
        return scaled[0], scaled[1], scaled[2], None, None, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Their product; in place, unless this graph's gradients will be asked for again (`retain_graph`)."""
    wide = gradient.to(factor.dtype)
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
        return wide * factor
    return wide.mul_(factor)


def _selected(hidden: Tensor, labels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """These tokens alone, and some without a label where their number is no multiple of `ROW_STEP`: products
    would pad the logits, which are far wider."""
    missing = -len(tokens) % ROW_STEP if len(tokens) > ROW_STEP and hidden.device.type == "cpu" else 0
    hidden, labels = hidden.index_select(0, tokens), labels.index_select(0, tokens)
    return F.pad(hidden, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=IGNORED)


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    wanted: list[bool],
    rows: Rows | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """The summed loss, and its gradients with respect to hidden, weight and bias where wanted."""
    loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = grad_bias = None
    matrix = weight.to(hidden.dtype)
    height = len(weight) if rows is None else rows.most  # so that all processes have as many chunks
    for part, label, run in _parts(hidden, labels, height, weight.shape[1]):
        logits = linear(part, matrix).to(loss.dtype)
        if bias is not None:
            logits += bias
        total, slope = _chunk(logits, label, smoothing, any(wanted), rows)
        loss += total
        if slope is None:
            continue
        slope = slope.to(hidden.dtype)
        if grad_hidden is not None:
            grad_hidden[run] = input_gradient(slope, matrix)
        if wanted[1]:
            grad_weight = _sum(grad_weight, weight_gradient(slope, part).to(loss.dtype))
        if wanted[2]:
            grad_bias = _sum(grad_bias, slope.sum(0).to(loss.dtype))
    return loss, [grad_hidden, grad_weight, grad_bias]


def _parts(hidden: Tensor, labels: Tensor, vocab: int, width: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Equal runs of the tokens, at least one: their hidden states and labels, and where they lie."""
    most = max(CHUNK_ENTRIES // vocab, 2 * width, 1)
    rows = -(-len(hidden) // -(-len(hidden) // most)) if len(hidden) else 1
    if rows > ROW_STEP:
        rows += -rows % ROW_STEP
    for start in range(0, max(len(hidden), 1), rows):
        run = slice(start, start + rows)
        yield hidden[run], labels[run], run


def _sum(total: Tensor | None, term: Tensor) -> Tensor:
    """The running sum with one term more."""
    return term if total is None else total.add_(term)


def _chunk(
    logits: Tensor, labels: Tensor, smoothing: float, gradient: bool, rows: Rows | None
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of one chunk, and its slope by the logits: those of all tokens, or of `rows`."""
    labelled = labels != IGNORED
    place, here = (labels.masked_fill(~labelled, 0), labelled) if rows is None else rows.places(labels)
    index, vocab = place.unsqueeze(1), logits.shape[1] if rows is None else rows.vocab
    wanted = (1 - smoothing) * logits.gather(1, index).squeeze(1).masked_fill(~here, 0.0)
    if smoothing:
        wanted += smoothing * (logits.sum(1) / vocab)
    if rows is not None:
        lse, wanted, slope = _over_processes(logits, wanted, rows)
    elif gradient:  # of the softmax, made in one pass, the largest entry tells the sum too
        largest = logits.amax(1)
        in_place = logits.is_cpu and not torch.compiler.is_compiling()  # a row is read, then written
        slope = torch.softmax(logits, 1, out=logits if in_place else None)
        lse = largest - slope.amax(1).log()
    else:
        slope, lse = None, logits.logsumexp(1)
    total = (lse - wanted).masked_fill(~labelled, 0.0).sum()
    if slope is None or not gradient:
        return total, None
    slope.scatter_add_(1, index, here.unsqueeze(1).to(slope.dtype).mul_(smoothing - 1))
    if smoothing:
        slope -= smoothing / vocab
    if torch.compiler.is_compiling():
        return total, slope.mul_(labelled.unsqueeze(1))
    return total, slope.index_fill_(0, (~labelled).nonzero().squeeze(1), 0.0)


def _over_processes(logits: Tensor, wanted: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Of own logits [n, v], which are overwritten, and what they add to the label's: the log-sum-exp of all
    processes' and the sum of what they add, [n] each, and the softmax's own part [n, v]."""
    largest = rows.largest(logits.amax(1))
    powers = logits.sub_(largest.unsqueeze(1)).exp_()
    sums, wanted = rows.total(torch.stack([powers.sum(1), wanted]))
    return largest + sums.log(), wanted, powers.div_(sums.unsqueeze(1))
