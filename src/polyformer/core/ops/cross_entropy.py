"""Cross-entropy of a linear layer's output without storing all logits, and adaptive softmax.

The loss over a vocabulary of V is the only place with a tensor [tokens, V]. Here the tokens are processed in
chunks: the logits of a chunk give its loss and, if needed, the gradients of the hidden states and of the
weights; then the logits are freed. Memory: one chunk; products: the usual three. Second-order gradients
(`create_graph=True`) need the logits of all labelled tokens at once.

Precision: logits, the loss and sums over chunks have at least float32. On a GPU under autocast the factors of
the three products have autocast's type, and the vocabulary is filled up to a multiple of `ALIGNED`: the
products of a large vocabulary take more time than a small model. On a CPU the products are in float32.

A few logits (`FEW`) are computed at once, as in the definition: the steps of a chunk would take longer.

Adaptive softmax has a vocabulary in clusters of decreasing frequency, few of them needed by a text. With
cluster 0 the frequent tokens c_0 = 0 .. c_1 - 1, and cluster i > 0 the tokens c_i .. c_(i+1) - 1,

    head = log softmax([P_0^T h W_0^T + b_0,  P_0^T h G^T + g])       c_1 tokens, then one entry per cluster
    log p(w) = head[w]                                                 w in cluster 0
    log p(w) = head[c_1 + i - 1] + log softmax(P_i^T h W_i^T + b_i)[w - c_i]      w in cluster i

W_i [V_i, d_i] are token vectors, P_i [E, d_i] a projection to their width (none if d_i = E), and G [K, d_0]
the vectors of K clusters. A loss needs the head for every token, but cluster i only for its tokens: about V_0
+ K + sum_i p_i V_i logits per token instead of V, with p_i the share of a text in cluster i. Grave et al.
2017, section 4; projections and narrower vectors: Baevski and Auli 2019, section 3.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from polyformer.core.host_values import IGNORED, check_labels, host_values, to_device
from polyformer.core.ops.autograd import WHOLE, is_autocast, refuse_second_order, without_autocast
from polyformer.core.ops.linear import input_gradient, linear, weight_gradient
from polyformer.core.ops.product_kernels import ROW_STEP

CHUNK_ENTRIES = 1 << 25
"""The most logits in memory, 128 MiB in float32, or twice the number of weights if that is more.

The gradient of the weights is in memory anyway. The limit depends on memory only, not on the processor.
"""

FEW = 1 << 18
"""The most logits that are computed at once."""

ALIGNED = 64
"""On a GPU tensor cores read rows of whole cache lines: 128 bytes in half precision."""


class VocabularyShard(Protocol):
    """The `vocab` rows of weight and bias, divided among processes with the same hidden states and labels.

    Each process has at most `most` of the rows: `polyformer.training.distributed.tensor_parallel`.
    """

    vocab: int
    most: int

    def places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each id among the local rows (0 if not local), and whether it is local."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of all processes' x, in the memory of x."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all processes' x, in the memory of x."""
        ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float = 0.0,
    rows: VocabularyShard | None = None,
) -> Tensor:
    """Return the mean cross-entropy of softmax(hidden weight^T + bias) over the labelled tokens.

    Args:
        hidden: [..., E]. weight: [V, E]. bias: [V] or None.
        labels: [...] in 0..V-1, or -100 for tokens without a label. Without any labels the loss is 0.
        smoothing: probability mass spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
        rows: set if weight and bias are these rows of the whole vocabulary, divided among processes.

    Raises:
        InputError: labels of another shape, or outside the vocabulary.
    """
    check_labels(labels, hidden.shape[:-1], len(weight) if rows is None else rows.vocab)
    # A masked language model predicts only one token in seven.
    tokens = None if torch.compiler.is_compiling() else _labelled(labels)
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if tokens is not None and rows is None and _is_small(hidden, weight):
        total = _total(hidden, weight, bias, labels, tokens, smoothing, hidden.dtype)
        return total / max(len(tokens), 1)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, tokens, smoothing, rows)


def _is_small(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether logits are few, and have the type of the hidden states and the weight."""
    exact = hidden.dtype == weight.dtype and hidden.dtype in (torch.float32, torch.float64)
    return exact and len(hidden) * len(weight) <= FEW and not torch._C._is_any_autocast_enabled()


def _total(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tokens: Tensor | None,
    smoothing: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the summed cross-entropy of softmax(hidden weight^T + bias), the definition, in `dtype`.

    Of the `tokens` only, which are all tokens with a label: a NaN elsewhere has no effect.
    """
    if tokens is not None and len(tokens) < len(labels):
        hidden, labels = hidden.index_select(0, tokens), labels.index_select(0, tokens)
    logits = F.linear(hidden, weight.to(hidden.dtype)).to(dtype)
    logits = logits if bias is None else logits + bias
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum")


def _labelled(labels: Tensor) -> Tensor:
    """Return the indices of the tokens with a label [...], in order."""
    values = host_values(labels)
    tokens = ((labels if values is None else values).flatten() != IGNORED).nonzero().squeeze(1)
    return tokens if tokens.device == labels.device else to_device(tokens, labels.device)


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
        rows: VocabularyShard | None,
    ) -> Tensor:
        """Return -sum_t log softmax(hidden_t weight^T + bias)[label_t] / count; compute its gradients too."""
        inputs = hidden, weight, bias, labels  # for second-order gradients
        wanted = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
        dtype = _product_type(hidden)
        with without_autocast(hidden):
            count = (labels != IGNORED).sum().clamp_min(1)
            ctx.tokens, ctx.shape, ctx.rows = tokens, hidden.shape, rows  # type: ignore[attr-defined]
            labelled = None
            if tokens is not None:
                hidden, labels = _selected(hidden, labels, tokens)
                labelled = len(tokens)
            total, gradients = _chunks(hidden, weight, bias, labels, smoothing, wanted, rows, labelled, dtype)
        ctx.smoothing = smoothing  # type: ignore[attr-defined]
        ctx.save_for_backward(count, *gradients, *inputs)  # type: ignore[arg-type] - None is fine
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]  # type: ignore[attr-defined]
        return total / count

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return grad_x = grad / count * (the gradient of the sum, computed by `forward`) for each x."""
        count, *saved = ctx.saved_tensors  # type: ignore[attr-defined]
        gradients, inputs = saved[:3], saved[3:]
        tokens: Tensor | None = ctx.tokens  # type: ignore[attr-defined]
        rows: VocabularyShard | None = ctx.rows  # type: ignore[attr-defined]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            if rows is not None:
                refuse_second_order("a vocabulary divided among processes", WHOLE)
            again = _differentiable(*inputs, tokens, ctx.smoothing, grad / count)  # type: ignore[attr-defined]
            return *again, None, None, None, None
        # Divide by the count only here, together with the factor of a scaled loss: float16 underflows at
        # 6e-8.
        factor = grad / count
        dtypes = ctx.dtypes  # type: ignore[attr-defined]
        scaled = [
            None if gradient is None else _scaled(gradient, factor).to(dtype)
            for gradient, dtype in zip(gradients, dtypes)
        ]
        if scaled[0] is not None and rows is not None:  # so far only from this process's logits
            scaled[0] = rows.total(scaled[0])
        if scaled[0] is not None and tokens is not None:
            zeros = scaled[0].new_zeros(ctx.shape)  # type: ignore[attr-defined]
            scaled[0] = zeros.index_copy_(0, tokens, scaled[0][: len(tokens)])
        return scaled[0], scaled[1], scaled[2], None, None, None, None


def _differentiable(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    tokens: Tensor | None,
    smoothing: float,
    factor: Tensor,
) -> list[Tensor | None]:
    """Return differentiable gradients of hidden, weight and bias, from all logits at once."""
    # Views are separate inputs, even if the weight was computed from the hidden states.
    views = [None if x is None else x.view_as(x) for x in (hidden, weight, bias)]
    x, matrix, offset = views
    assert x is not None
    assert matrix is not None
    with without_autocast(x):
        total = _total(x, matrix, offset, labels, tokens, smoothing, factor.dtype)
    wanted = [view for view in views if view is not None and view.requires_grad]
    gradients = iter(torch.autograd.grad(total, wanted, factor, create_graph=True))
    return [next(gradients) if view is not None and view.requires_grad else None for view in views]


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient * factor; in place, unless another backward pass needs the graph (`retain_graph`)."""
    wide = gradient.to(factor.dtype)
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
        return wide * factor
    return wide.mul_(factor)


def _selected(hidden: Tensor, labels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selected tokens, padded with unlabelled tokens to a multiple of `ROW_STEP`.

    Otherwise the products would pad the logits, which are far wider.
    """
    missing = -len(tokens) % ROW_STEP if len(tokens) > ROW_STEP and hidden.device.type == "cpu" else 0
    hidden, labels = hidden.index_select(0, tokens), labels.index_select(0, tokens)
    return F.pad(hidden, (0, 0, 0, missing)), F.pad(labels, (0, missing), value=IGNORED)


def _on_gpu(x: Tensor) -> bool:
    """Return whether products of x run on a GPU, outside a compiled graph."""
    return x.is_cuda and not torch.compiler.is_compiling()


def _product_type(hidden: Tensor) -> torch.dtype:
    """Return the type of the products' factors: on a GPU autocast's, if it is on."""
    if hidden.is_cuda and hidden.dtype == torch.float32 and is_autocast("cuda"):
        return torch.get_autocast_dtype("cuda")
    return hidden.dtype


def _matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [V, E] in `dtype`, on a GPU with rows of zeros up to a multiple of `ALIGNED`."""
    missing = -len(weight) % ALIGNED if _on_gpu(weight) else 0
    if not missing:
        return weight.to(dtype)
    matrix = weight.new_zeros(len(weight) + missing, weight.shape[1], dtype=dtype)
    matrix.narrow(0, 0, len(weight)).copy_(weight)
    return matrix


def _chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    smoothing: float,
    wanted: list[bool],
    rows: VocabularyShard | None,
    labelled: int | None,
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the summed loss, and its gradients with respect to hidden, weight and bias if wanted.

    labelled: the number of tokens with labels, if these come first; None: unknown. dtype: of the products'
    factors.
    """
    loss = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = grad_bias = None
    matrix, own = _matrix(weight, dtype), len(weight)
    height = own if rows is None else rows.most  # for equal numbers of chunks in all processes
    for part, label, run in _parts(hidden.to(dtype), labels, height, weight.shape[1]):
        logits = _logits(part, matrix, loss.dtype)
        if bias is not None:
            logits[:, :own] += bias
        if len(matrix) > own:
            logits[:, own:] = -torch.inf
        total, slope = _chunk(logits, label, smoothing, any(wanted), own, rows)
        loss += total
        if slope is None:
            continue
        if labelled is None:
            slope.mul_((label != IGNORED).unsqueeze(1))
        else:
            slope[max(labelled - run.start, 0) :] = 0.0
        slope = slope.to(dtype)
        if grad_hidden is not None:
            grad_hidden[run] = input_gradient(slope, matrix)
        if wanted[1]:
            grad_weight = _sum(grad_weight, _weight_gradient(slope, part, loss.dtype))
        if wanted[2]:
            grad_bias = _sum(grad_bias, slope.sum(0, dtype=loss.dtype))
    return loss, [grad_hidden, *(None if x is None else x[:own] for x in (grad_weight, grad_bias))]


def _logits(x: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x [N, E] times matrix [V, E] transposed, in `dtype`."""
    if _keeps_sums(x, dtype):
        return torch.mm(x, matrix.T, out_dtype=dtype)
    return linear(x, matrix).to(dtype)


def _weight_gradient(slope: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return slope [N, V] transposed times x [N, E], in `dtype`."""
    if _keeps_sums(x, dtype):
        return torch.mm(slope.T, x, out_dtype=dtype)
    return weight_gradient(slope, x).to(dtype)


def _keeps_sums(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a product of half-precision factors can return its sums in `dtype`: only on a GPU."""
    return _on_gpu(x) and x.dtype != dtype == torch.float32


def _parts(hidden: Tensor, labels: Tensor, vocab: int, width: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Yield equal runs of the tokens, at least one: their hidden states, labels and slice."""
    most = max(CHUNK_ENTRIES // vocab, 2 * width, 1)
    rows = -(-len(hidden) // -(-len(hidden) // most)) if len(hidden) else 1
    if rows > ROW_STEP:
        rows += -rows % ROW_STEP
    for start in range(0, max(len(hidden), 1), rows):
        run = slice(start, start + rows)
        yield hidden[run], labels[run], run


def _sum(total: Tensor | None, term: Tensor) -> Tensor:
    """Return the running sum plus one term."""
    return term if total is None else total.add_(term)


def _chunk(
    logits: Tensor, labels: Tensor, smoothing: float, gradient: bool, own: int, rows: VocabularyShard | None
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss of one chunk and its gradient by the logits, for all tokens or for `rows`.

    own: the number of columns that are tokens; the logits of the others are -inf. The gradient in the rows of
    tokens without a label is arbitrary.
    """
    labelled = labels != IGNORED
    place, here = (labels.masked_fill(~labelled, 0), labelled) if rows is None else rows.places(labels)
    index, vocab = place.unsqueeze(1), own if rows is None else rows.vocab
    wanted = (1 - smoothing) * logits.gather(1, index).squeeze(1).masked_fill(~here, 0.0)
    if smoothing:
        wanted += smoothing * (logits[:, :own].sum(1) / vocab)
    if rows is not None:
        lse, wanted, slope = _over_processes(logits, wanted, rows)
    elif gradient:  # the softmax takes one pass, and its largest entry gives the sum too
        largest = logits.amax(1)
        in_place = logits.is_cpu and not torch.compiler.is_compiling()  # rows are read first
        slope = torch.softmax(logits, 1, out=logits if in_place else None)
        lse = largest - slope.amax(1).log()
    else:
        slope, lse = None, logits.logsumexp(1)
    total = (lse - wanted).masked_fill(~labelled, 0.0).sum()
    if slope is None or not gradient:
        return total, None
    slope.scatter_add_(1, index, here.unsqueeze(1).to(slope.dtype).mul_(smoothing - 1))
    if smoothing:
        slope[:, :own] -= smoothing / vocab
    return total, slope


def _over_processes(logits: Tensor, wanted: Tensor, rows: VocabularyShard) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-sum-exp and the label logits over all processes, [n] each, and the local softmax [n, v].

    logits: the local logits [n, v], which are overwritten. wanted: the local part of the label logits.
    """
    largest = rows.largest(logits.amax(1))
    powers = logits.sub_(largest.unsqueeze(1)).exp_()
    sums, wanted = rows.total(torch.stack([powers.sum(1), wanted]))
    return largest + sums.log(), wanted, powers.div_(sums.unsqueeze(1))


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
    """The parameters of one cluster: vectors W [V_i, d_i], their bias [V_i], projection P [E, d_i].

    The vectors of the first cluster are followed by the vectors of the other clusters, G [K, d_0].
    """

    vectors: Tensor
    bias: Tensor | None = None
    projection: Tensor | None = None

    def projected(self, hidden: Tensor) -> Tensor:
        """Return P^T h: hidden [..., E] -> [..., d_i]."""
        return hidden if self.projection is None else linear(hidden, self.projection.t())

    def log_softmax(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of the cluster's entries: hidden [..., E] -> [..., V_i]."""
        logits = linear(self.projected(hidden), self.vectors, self.bias)
        return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))


def log_probabilities(hidden: Tensor, clusters: Sequence[Cluster]) -> Tensor:
    """Return the log-probabilities of all tokens: hidden [..., E] -> [..., V], in the dtype of hidden."""
    head = clusters[0].log_softmax(hidden)
    frequent = head.shape[-1] - (len(clusters) - 1)
    tails = [
        head[..., frequent + i : frequent + i + 1] + cluster.log_softmax(hidden)
        for i, cluster in enumerate(clusters[1:])
    ]
    return torch.cat([head[..., :frequent], *tails], -1).to(hidden.dtype)


def adaptive_cross_entropy(hidden: Tensor, clusters: Sequence[Cluster], labels: Tensor) -> Tensor:
    """Return the mean of -log p(label), with logits only for clusters that contain labels.

    Args:
        hidden: [..., E]. labels: [...] in 0..V-1, or -100 for tokens without a label; without any labels
            the loss is 0.

    Raises:
        InputError: labels of another shape, or outside the vocabulary.
    """
    frequent = len(clusters[0].vectors) - (len(clusters) - 1)
    starts = [0, frequent]
    for cluster in clusters[1:]:
        starts.append(starts[-1] + len(cluster.vectors))
    check_labels(labels, hidden.shape[:-1], starts[-1])
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    first, count = labels, (labels != IGNORED).sum().clamp_min(1)
    tails = []
    for i, cluster in enumerate(clusters[1:], 1):
        inside = (labels >= starts[i]) & (labels < starts[i + 1])
        first = torch.where(inside, frequent + i - 1, first)
        mean = _mean_of(cluster, hidden, torch.where(inside, labels - starts[i], IGNORED))
        tails.append(mean * inside.sum() / count)
    return torch.stack([_mean_of(clusters[0], hidden, first), *tails]).sum()


def _mean_of(cluster: Cluster, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of one cluster over its labelled tokens; 0 if there are none."""
    if not torch.compiler.is_compiling() and cluster.projection is not None:  # to project these rows only
        rows = (labels != IGNORED).nonzero().squeeze(1)
        hidden, labels = hidden.index_select(0, rows), labels.index_select(0, rows)
    return linear_cross_entropy(cluster.projected(hidden), cluster.vectors, cluster.bias, labels)
