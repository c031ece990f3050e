"""Exact attention over the keys of a layout, tile by tile: any pattern, any device, forward and backward.

Nothing of size Tq x Tk is ever made. The forward pass keeps the output and the log-sum-exp of each row; the
backward pass computes the scores again, tile by tile, and adds into gradients made once (Dao et al. 2022,
FlashAttention, algorithms 1 and 4; here over the intervals of a layout). Scores are kept in base 2, because
exp2 is the faster function on a CPU. float16 and bfloat16 are computed in float32.

It cannot be traced by `torch.compile` (the tiles depend on the layout, and the gradients of a `score_mod`
are found by watching it run): under `fullgraph=True` use the backends `sdpa` or `flex`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.core.captured import Evaluation, captured
from polyformer.core.parts import Part, parts, sharing
from polyformer.core.products import product
from polyformer.core.request import Request
from polyformer.core.tiles import Tile, give, take
from polyformer.core.workers import spread

LN2 = math.log(2)
T = TypeVar("T")


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request, or None."""
    if request.relative is not None and request.relative.position_values is not None:
        return "terms in the values are not there yet"
    return None


@torch.compiler.disable(reason="blocks walks a layout in Python; compile with the backend 'sdpa' or 'flex'")
def run(request: Request) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]."""
    if request.relative is not None:
        mod = request.whole_score_mod(request.context)
        request = dataclasses.replace(request, relative=None, score_mod=mod)
    half = request.q.dtype in (torch.float16, torch.bfloat16)
    q, k, v = (x.float() if half else x for x in (request.q, request.k, request.v))
    tables = captured(request.score_mod, q)
    # The seed comes from torch's generator, so that torch.manual_seed repeats a run; the rest from our own.
    seed = int(torch.randint(2**62, ())) if request.dropout else 0
    out, lse = _Attention.apply(_Call(request, tables, seed, torch.get_num_threads()), q, k, v, *tables)  # type: ignore[misc]
    return out.to(request.q.dtype), lse


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """What forward and backward share besides the tensors that autograd sees."""

    request: Request
    tables: tuple[Tensor, ...]
    seed: int
    threads: int

    def spread(self, work: Callable[[Sequence[Part]], T]) -> list[T]:
        """The results of `work` on all parts, the same ones forward and backward, on a CPU's threads."""
        whole = parts(self.request, self.seed, self.threads)
        return [work(whole)] if self.request.q.is_cuda else spread(work, whole)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full((*q.shape[:3], 1), -torch.inf)

        def work(group: Sequence[Part]) -> None:
            for part in sharing(group):
                inputs = part.by_query(q), part.by_key(k), part.by_key(v)
                outs, sums = part.by_query(out), part.by_query(lse)
                for row in part.rows:
                    value, total = _row_forward(part, row, *inputs)
                    part.put(outs, row[0], value)
                    part.put(sums, row[0], total)

        call.spread(work)
        lse = lse.squeeze(-1)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, *tables)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        request, tables = ctx.call.request, ctx.call.tables
        # d score = p (d p - shift): every path through the softmax's denominator, and through lse itself.
        shift = (grad_out * out).sum(-1)
        shift = shift if grad_lse is None else shift - grad_lse
        empty = lse == -torch.inf
        rows = (
            grad_out,
            shift.masked_fill(empty, 0).unsqueeze(-1),
            lse.masked_fill(empty, 0).unsqueeze(-1) / LN2,
        )
        dq = q.new_zeros(q.shape)
        dk, dv = (_columns(x) for x in (k, v))

        def work(group: Sequence[Part]) -> tuple[Tensor, ...]:
            totals = tuple(torch.zeros_like(table) for table in tables)
            for part in sharing(group):
                inputs = part.by_query(q), part.by_key(k), part.by_key(v)
                outs = tuple(part.by_query(x) for x in rows)
                grad_q, grads = part.by_query(dq), (part.by_key(dk), part.by_key(dv))
                for row in part.rows:
                    part.put(grad_q, row[0], _row_backward(part, row, inputs, outs, grads, (tables, totals)))
            return totals

        totals, *others = ctx.call.spread(work)
        for other in others:
            for total, more in zip(totals, other):
                total += more
        return None, dq.mul_(request.scale), dk.mul_(request.scale).mT, dv.mT, *totals


def _columns(x: Tensor) -> Tensor:
    """Zeros [B, H, D, T] for x [B, H, T, D]: products that add to columns are the fastest.

    The rows lie a little further apart than their length, for at a power of 2 they would share cache lines.
    """
    return x.new_zeros(*x.shape[:2], x.shape[3], x.shape[2] + 16)[..., : x.shape[2]]


def _row_forward(part: Part, row: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one row, [N, G * queries, Dv or 1]; several tiles are joined as they come."""
    queries = part.queries(q, row[0]) * part.factor
    lowest, tiny = torch.finfo(q.dtype).min, torch.finfo(q.dtype).tiny
    top = total = value = None
    for tile in row:
        scores = part.scores(tile, queries, take(k, tile.keys))
        peak = scores.amax(-1, keepdim=True).clamp_(min=lowest)  # a row of nothing: exp2(-inf - lowest) = 0
        if top is not None:
            peak = torch.maximum(top, peak)
        weights = scores.sub_(peak).exp2_()
        mass = weights.sum(-1, keepdim=True)
        if part.request.dropout:
            weights *= part.kept(weights)
        seen = product(weights, take(v, tile.keys))
        if top is None or total is None or value is None:
            total, value = mass, seen
        else:
            fade = torch.exp2(top - peak)
            total, value = total.mul_(fade).add_(mass), value.mul_(fade).add_(seen)
        top = peak
    assert top is not None, "a row has at least one tile"
    assert total is not None
    assert value is not None
    return value / total.clamp_min(tiny), (top + total.log2()) * LN2


def _row_backward(part: Part, row: tuple[Tile, ...], inputs: tuple[Tensor, ...], outs: tuple[Tensor, ...],
                  keys: tuple[Tensor, Tensor],
                  tables: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> Tensor:  # fmt: skip
    """The gradient of one row's queries [N, G * queries, D]; to those of keys and tables it is added."""
    q, k, v = inputs
    queries = part.queries(q, row[0])
    grad_out, shift, lse = (part.queries(x, row[0]) for x in outs)
    queries_t, grad_out_t, queries = queries.mT.contiguous(), grad_out.mT.contiguous(), queries * part.factor
    grad_queries = None
    for tile in row:
        tile_k = take(k, tile.keys)
        if part.request.score_mod is None:
            evaluation, scores = None, part.scores(tile, queries, tile_k)
        else:
            evaluation = Evaluation(part.request.score_mod, tables[0], *part.raw(tile, queries, tile_k))
            scores = part.finish(tile, evaluation.value.detach())
        weights = scores.sub_(lse).exp2_()
        grad = part.product("gradient", grad_out, take(v, tile.keys).mT)
        kept = weights
        if part.request.dropout:
            keep = part.kept(weights)
            kept, grad = weights * keep, grad.mul_(keep)
        give(keys[1], tile.keys, product(grad_out_t, kept))
        grad = grad.sub_(shift).mul_(weights)
        if evaluation is not None:
            grad = evaluation.backward(part.tiled(tile, grad), tables[1]).reshape(grad.shape)
        give(keys[0], tile.keys, product(queries_t, grad))
        seen = product(grad, tile_k)
        grad_queries = seen if grad_queries is None else grad_queries.add_(seen)
    assert grad_queries is not None, "a row has at least one tile"
    return grad_queries
