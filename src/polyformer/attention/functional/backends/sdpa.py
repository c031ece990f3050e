"""torch's fused attention, for the calls that it computes exactly: no score_mod, and no mask or a small mask.

Biases by distance and terms of distance vectors in the scores become a mask of numbers if this mask is small
and no gradient is required.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from polyformer.attention.functional.backends import flex
from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Request, indices, is_ordinary
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.composition import simple_parts
from polyformer.attention.patterns.implied import Causal, Full, Padding
from polyformer.attention.patterns.layout import count
from polyformer.core.ops.autograd import mark_first_order
from polyformer.core.sequence.context import Context

MASK_LIMIT, CUDA_PADDING_LIMIT, CUDA_MASK_LIMIT = 1 << 22, 1 << 26, 1 << 28
"""Largest number of entries of a boolean mask (4 MiB); longer inputs are for `tiled` or `flex`.

On CUDA the second limit is for padding and causality, which leave little to skip and differ in length from
batch to batch, and FlexAttention compiles each length. The third is for calls for which `auto` passes
FlexAttention over (512 MiB in half precision for all layers): `tiled` is many times as slow there.
"""

SPARSE_FROM = 1 << 23
"""Number of multiplications of q k^T from which skipping the unneeded keys of a sparse pattern is faster."""

BIAS_LIMIT, CUDA_BIAS_LIMIT = 1 << 18, 1 << 27
"""Largest number of entries of a mask of biases for all heads, or for all heads and rows of the batch.

The second limit is like `CUDA_MASK_LIMIT`, and also for a learned bias: the gradients of a few numbers that
all pairs share are slow in FlexAttention. Each layer keeps such a mask for the backward pass.
"""

DENSE_LIMIT, DROPOUT_LIMIT = 1 << 26, 1 << 20
"""Largest number of scores for calls that torch computes densely because no fused kernel applies.

The limit is lower for dropout on a CPU because `tiled` has a faster generator (`core.ops.layers`).
"""


def refuses(request: Request) -> str | None:
    """Return why this backend cannot run the request, or None."""
    if request.score_mod is not None or (request.relative is not None and not _short_terms(request)):
        return "a score_mod or relative terms change the scores"
    if request.return_lse:
        return "torch's function does not return the log-sum-exp"
    if forward_ad._current_level >= 0:
        return "torch's kernels have no forward differentiation"
    scores = request.pairs
    if scores == 0:
        return "there is nothing to attend to"
    q, v = request.q, request.v
    dense = q.dtype == torch.float64 if q.is_cuda else q.shape[3] != v.shape[3]
    if dense and scores > DENSE_LIMIT:
        return "torch has no fused kernel for this width or type and would compute all scores at once"
    if request.dropout > 0 and q.is_cpu and scores > DROPOUT_LIMIT:
        return "torch has no fused kernel for dropout here and draws its numbers slowly"
    return None if request.pattern is None or _plain(request) is not None else _refuses_mask(request)


def _refuses_mask(request: Request) -> str | None:
    """Return why this backend cannot mask the pattern of a request, or why others compute less, or None."""
    pattern = request.pattern
    assert pattern is not None
    batch, heads, queries, width = request.q.shape
    pairs, cuda = queries * request.context.kv_len, request.q.is_cuda
    # On a CPU, masks that differ by head cost more than a call for each pattern.
    masks = batch * (heads if not cuda and pattern.head_pattern(0) != pattern else 1)
    if masks * pairs > (limit := _mask_limit(request)):
        return f"its mask would have more than {limit} entries"
    # So few pairs are nothing to a GPU, and reading the tables of a layout waits for it; tracing cannot read.
    if cuda or torch.compiler.is_compiling() or isinstance(request.context.offset, Tensor):
        return None
    if batch * heads * pairs * width >= SPARSE_FROM:
        share = request.context.once(
            ("share", pattern, heads), lambda: _share(pattern, heads, request.context)
        )
        # Other backends skip the keys that the layout does not list.
        if share < 0.5:
            return f"it would compute every pair and the pattern needs {share:.0%} of them"
    return None


def _mask_limit(request: Request) -> int:
    """Return the largest number of entries of a mask of this call."""
    if not _is_fused_on_cuda(request) or request.pattern is None:
        return MASK_LIMIT
    if _is_last_resort(request):
        return CUDA_MASK_LIMIT
    is_padding = all(isinstance(part, Full | Causal | Padding) for part in simple_parts(request.pattern))
    return CUDA_PADDING_LIMIT if is_padding else MASK_LIMIT


def _is_fused_on_cuda(request: Request) -> bool:
    """Return whether torch has a fused kernel with a mask for the call on CUDA."""
    return request.q.device.type == "cuda" and request.q.dtype != torch.float64


def _is_last_resort(request: Request) -> bool:
    """Return whether FlexAttention, the only other fast kernel for CUDA, does not run the call."""
    return (flex.passed_over(request) or flex.refuses(request)) is not None


def run(request: Request) -> tuple[Tensor, None]:
    """Return output [B, H, Tq, Dv], and None for the log-sum-exp."""
    return plan(request)(request.q, request.k, request.v, request.dropout), None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A call without its inputs. mask: [B or 1, H or 1, Tq, Tk]. empty: the rows of the mask without a key.

    hides: whether some query may not see some key.
    """

    mask: Tensor | None
    empty: Tensor | None
    is_causal: bool
    scale: float
    grouped: bool
    hides: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """Return output [B, H, Tq, Dv]."""
        shape, grouped = None, False
        if self.grouped or q.is_cuda:
            shape = *q.shape[:3], v.shape[3]
            q, k, v, grouped = self._arranged(q, k, v)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.mask,
            dropout_p=dropout,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=grouped,
        )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and _is_fused(out):
            mark_first_order(out, "torch's fused attention (backend 'sdpa')")
        if shape is not None and out.shape != shape:
            out = out.narrow(3, 0, shape[3]).reshape(shape)
        return out if self.empty is None else out.masked_fill(self.empty, 0.0)

    def _arranged(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Return the inputs for the fastest kernel, and whether their query heads share key heads."""
        flash, grouped = q.is_cuda and self._fits_flash(q, v), self.grouped
        if grouped and not flash and q.shape[2] == 1 and (self.mask is None or self.mask.shape[1] == 1):
            # A single query per head becomes a query of the key head, so that its keys are read only once.
            q, grouped = q.unflatten(1, (-1, q.shape[1] // k.shape[1])).flatten(2, 3), False
        if q.is_cuda and not flash:
            return *self._for_efficient(q, k, v), False
        return q, k, v, grouped

    def _fits_flash(self, q: Tensor, v: Tensor) -> bool:
        """Return whether torch's flash kernel runs the call, which takes grouped heads and any width."""
        half = q.dtype in (torch.float16, torch.bfloat16)
        return half and self.mask is None and q.shape[3] == v.shape[3] <= 256

    def _for_efficient(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs in a form for torch's memory-efficient kernel, else it computes all scores.

        The kernel takes one query head per key head, and widths that are a multiple of 8.
        """
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        q, k, v = (F.pad(x, (0, -x.shape[3] % 8)) if x.shape[3] % 8 else x for x in (q, k, v))
        return q, k, v


def _is_fused(out: Tensor) -> bool:
    """Return whether a fused kernel computed `out`; the dense form has gradients of every order."""
    return out.grad_fn is not None and out.grad_fn.name().startswith("ScaledDotProduct")


def plan(request: Request) -> Plan:
    """Return the plan shared by all calls of a context: the calls of its layers differ only in q, k and v."""
    plain, context, relative = _plain(request), request.context, request.relative
    mask = empty = None
    if plain is None:
        pattern = request.pattern
        assert pattern is not None, "everything is allowed: no mask is needed"
        adds = relative is None and (request.q.is_cuda or is_ordinary())
        numbers = request.q.dtype if adds else None
        key = "mask", pattern, request.q.device, numbers
        mask, empty = context.once(key, lambda: _mask(pattern, request, numbers))
    if relative is not None:
        bias, seen = _bias(relative, request), mask
        # torch takes a mask or `is_causal`, not both: with biases, causality is part of the mask.
        if plain == "causal":
            seen = torch.ones(bias.shape[2:], dtype=torch.bool, device=bias.device).tril()
        mask, plain = (bias if seen is None else bias.masked_fill(~seen, -torch.inf)), "full"
    return Plan(
        mask, empty, plain == "causal", request.scale, bool(request.groups > 1), not sees_all(request)
    )


def _short_terms(request: Request) -> bool:
    """Return whether the terms may be a mask of numbers: the mask is small, and its precision is sufficient.

    Terms computed from vectors require float32 or more, because a mask has the type of the queries.
    """
    relative, q = request.relative, request.q
    if relative is None or not relative.tables.keys() <= {"bias", "position_keys"}:
        return False
    exact = q.dtype in (torch.float32, torch.float64)
    masks = q.shape[1] * q.shape[2] * request.context.kv_len
    learned = torch.is_grad_enabled() and relative.bias is not None and relative.bias.requires_grad
    if _is_fused_on_cuda(request) and (learned or _is_last_resort(request)):
        return (exact or relative.position_keys is None) and q.shape[0] * masks <= CUDA_BIAS_LIMIT
    if torch.is_grad_enabled():
        return False
    # A bias is the same for all batch rows; terms of vectors differ per row.
    if relative.position_keys is None:
        return masks <= BIAS_LIMIT
    return exact and q.shape[0] * masks <= BIAS_LIMIT


def _bias(relative: Relative, request: Request) -> Tensor:
    """Return the terms for the scores of all pairs, [B or 1, H or 1, Tq, Tk]."""
    _, _, q_idx, kv_idx = indices(request)
    # [Tq, Tk], the same for all heads and rows.
    entry = relative.entry(request.context.index_distance(q_idx, kv_idx))
    terms = [] if relative.bias is None else [relative.bias.to(request.q.dtype)[None, :, entry]]
    if relative.position_keys is not None:
        content = request.q if relative.content is None else relative.content
        # Join the batch rows of each head into a single product, which reads its position keys only once.
        rows = (content * request.scale).transpose(0, 1).flatten(1, 2)
        by_distance = (rows @ relative.position_keys.mT).unflatten(1, (-1, content.shape[2])).transpose(0, 1)
        terms.append(by_distance.gather(-1, entry.expand(*by_distance.shape[:2], *entry.shape)))
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _mask(pattern: Pattern, request: Request, numbers: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Return the mask, and its rows without a key; None if it is known to have no such row.

    A row without a key gets all keys in the mask, and its output is set to zero later: the kernels differ in
    their results for such a row, forward and backward.

    numbers: the type of a mask to be added to the scores, or None for a mask of bool. Torch converts a mask
    of bool for each layer, and each layer keeps it for the backward pass.
    """
    mask = pattern.mask(request.context, *indices(request))
    # [Tq, Tk] or [B, H, Tq, Tk]: torch expects four axes.
    mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    empty: Tensor | None = ~mask.any(-1, keepdim=True)
    if mask.is_cpu and is_ordinary() and not empty.any():
        empty = None
    seen = mask.contiguous() if empty is None else mask | empty
    if numbers is None:
        return seen, empty
    keys = mask.shape[3]
    # On CUDA the kernel copies a mask with rows that do not begin at a multiple of 8 entries.
    columns = -(-keys // 16) * 16
    added = torch.zeros(*mask.shape[:3], columns, dtype=numbers, device=mask.device)[..., :keys]
    return added.masked_fill_(~seen, -torch.inf), empty


def _share(pattern: Pattern, heads: int, context: Context) -> float:
    """Return the fraction of all pairs of query and key that the layouts of the heads list, on average."""
    needed = sum(
        len(members) * (row.stop - row.start) * count(row.keys.some)
        for own, members in pattern.heads_by_pattern(heads).items()
        for row in own.layout(context, 128)
    )
    return needed / (heads * context.q_len * context.kv_len)


def sees_all(request: Request) -> bool:
    """Return whether every query is known to see every key."""
    return _plain(request) == "full"


def _plain(request: Request) -> str | None:
    """Return "full" or "causal" if no mask is needed, else None."""
    context, pattern = request.context, request.pattern
    if pattern is None or isinstance(pattern, Full):
        return "full"
    if isinstance(pattern, Causal) and isinstance(context.offset, int):  # a graph may not know the offset
        return causal_kernel(context.q_len, context.kv_len, context.offset)
    return None


def causal_kernel(queries: int, keys: int, first: int) -> str | None:
    """Return "full" or "causal" if causality needs no mask, else None. first: the slot of the first query.

    SDPA aligns `is_causal` at the top left, this library at the bottom right: both agree if no keys come
    before the first query. A single query at the slot of the last key sees all keys.
    """
    if queries == 1 and first >= keys - 1:
        return "full"
    return "causal" if first == 0 and queries == keys else None
