"""Exact attention over the keys of a layout, tile by tile: any pattern, any device, forward and backward.

Nothing of size Tq x Tk is ever made. The forward pass keeps the output and the log-sum-exp of each row; the
backward pass computes the scores again, tile by tile, and adds into gradients made once (Dao et al. 2022,
FlashAttention, algorithms 1 and 4; here over the intervals of a layout). Scores are kept in base 2, because
exp2 is the faster function on a CPU. float16 and bfloat16 are computed in float32.

It cannot be traced by `torch.compile` (the tiles depend on the layout, and the gradients of a `score_mod`
are found by watching it run): under `fullgraph=True` use the backends `sdpa` or `flex`.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.dot_product.backends.tiled.batched_tiles import Gathered, bundles
from polyformer.dot_product.backends.tiled.relative_terms import Bands, PartBands
from polyformer.dot_product.backends.tiled.score_mod_gradients import Evaluation, captured
from polyformer.dot_product.backends.tiled.tiles import Tile, give, take
from polyformer.dot_product.backends.tiled.work_items import LN2, Part, parts, sharing
from polyformer.dot_product.request import Request, transformed
from polyformer.ops.precision import as_written
from polyformer.ops.products import product
from polyformer.ops.workers import spread

T = TypeVar("T")


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request, or None."""
    if transformed():
        return "torch.func and forward differentiation cannot look into its loop over tiles"
    return None


@torch.compiler.disable(reason="tiled walks a layout in Python; compile with the backend 'sdpa' or 'flex'")
def run(request: Request) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]."""
    half = request.q.dtype in (torch.float16, torch.bfloat16)
    q, k, v = (x.float() if half else x for x in (request.q, request.k, request.v))
    tables = captured(request.score_mod, q)
    # The seed comes from torch's generator, so that torch.manual_seed repeats a run; the rest from our own.
    seed = int(torch.randint(2**62, ())) if request.dropout else 0
    threads, bands = torch.get_num_threads(), None
    if request.relative is not None:
        whole = parts(request, seed, threads)
        bands = Bands.of(request.relative.to(q.dtype), whole, request.context.offset)
    call = _Call(request, tables, bands, seed, threads)
    extra = () if bands is None else tuple(bands.tensors.values())
    out, lse = _Attention.apply(call, q, k, v, *extra, *tables)  # type: ignore[misc]
    return out.to(request.q.dtype), lse


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """What forward and backward share besides the tensors that autograd sees."""

    request: Request
    tables: tuple[Tensor, ...]
    bands: Bands | None
    seed: int
    threads: int

    def spread(self, work: Callable[[Sequence[Part]], T]) -> list[T]:
        """The results of `work` on all parts, the same ones forward and backward, on a CPU's threads."""
        whole = parts(self.request, self.seed, self.threads)
        return [work(whole)] if self.request.q.is_cuda else spread(work, whole)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full((*q.shape[:3], 1), -torch.inf)
        bands = None if call.bands is None else call.bands.of_tensors(extra)

        def work(group: Sequence[Part]) -> None:
            for part in sharing(group):
                inputs = part.by_query(q), part.gathered(k), part.gathered(v)
                outs, sums = part.by_query(out), part.by_query(lse)
                mine = None if bands is None else PartBands(part, bands)
                gathered, rest = bundles(part)
                for bundle in gathered:
                    several = Gathered(part, bundle)
                    value, total = several.forward(*inputs)
                    several.put(outs, value)
                    several.put(sums, total)
                for row in rest:
                    value, total = _row_forward(part, mine, row, *inputs)
                    part.put(outs, row[0], value)
                    part.put(sums, row[0], total)

        call.spread(work)
        lse = lse.squeeze(-1)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, *extra)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *extra = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        call: _Call = ctx.call
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
        bands = of_bands = None
        if call.bands is not None:
            bands = call.bands.of_tensors(extra)
            of_bands = bands.gradients(ctx.needs_input_grad[4:])
        lock = threading.Lock()

        def work(group: Sequence[Part]) -> tuple[Tensor, ...]:
            totals = tuple(torch.zeros_like(table) for table in call.tables)
            for part in sharing(group):
                mine = None if bands is None else PartBands(part, bands, of_bands, lock)
                inputs = _Inputs(part.by_query(q), part.gathered(k), part.gathered(v), mine, call.tables)
                grads = _Gradients(part.by_query(dq), part.by_key(dk), part.by_key(dv), totals)
                outs = tuple(part.by_query(x) for x in rows)
                gathered, rest = bundles(part)
                for bundle in gathered:
                    Gathered(part, bundle).backward(inputs[:3], outs, grads[:3])
                for row in rest:
                    _row_backward(part, row, inputs, outs, grads)
                if mine is not None:
                    mine.finish()
            return totals

        totals, *others = call.spread(work)
        for other in others:
            for total, more in zip(totals, other):
                total += more
        found = [] if bands is None or of_bands is None else of_bands.scaled(call.request.scale, bands)
        return None, dq.mul_(call.request.scale), dk.mul_(call.request.scale).mT, dv.mT, *found, *totals


def _columns(x: Tensor) -> Tensor:
    """Zeros [B, H, D, T] for x [B, H, T, D]: products that add to columns are the fastest.

    The rows lie a little further apart than their length, for at a power of 2 they would share cache lines.
    """
    return x.new_zeros(*x.shape[:2], x.shape[3], x.shape[2] + 16)[..., : x.shape[2]]


def _row_forward(
    part: Part, bands: PartBands | None, row: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one row, [N, G * queries, Dv or 1]; several tiles are joined as they come."""
    queries = part.queries(q, row[0])
    content = None if bands is None else bands.content(row[0], queries)
    queries = queries * part.factor
    lowest, tiny = torch.finfo(q.dtype).min, torch.finfo(q.dtype).tiny
    top = total = value = None
    for tile in row:
        scores = _raw(part, bands, tile, queries, take(k, tile.keys), content)
        if part.request.score_mod is None:
            scores = part.forbid(tile, scores)
        else:
            scores = part.finish(tile, part.request.score_mod(*part.mod_arguments(tile, scores)))
        peak = scores.amax(-1, keepdim=True).clamp_(min=lowest)  # a row of nothing: exp2(-inf - lowest) = 0
        if top is not None:
            peak = torch.maximum(top, peak)
        weights = scores.sub_(peak).exp2_()
        mass = weights.sum(-1, keepdim=True)
        if part.request.dropout:
            weights *= part.kept(weights)
        seen = product(weights, take(v, tile.keys))
        if bands is not None and bands.bands.values is not None:
            seen += bands.values(tile, weights)
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


def _raw(
    part: Part, bands: PartBands | None, tile: Tile, queries: Tensor, keys: Tensor, content: Tensor | None
) -> Tensor:
    """Scores with their relative terms, before score_mod and mask."""
    scores = part.raw(tile, queries, keys)
    if bands is not None and content is not None:
        bands.add(scores, tile, content, keys)
    return scores


class _Inputs(NamedTuple):
    """What a part's tiles are computed from."""

    q: Tensor
    k: Tensor
    v: Tensor
    bands: PartBands | None
    tables: tuple[Tensor, ...]


class _Gradients(NamedTuple):
    """Where a part's gradients go; those of keys and values lie in columns."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: tuple[Tensor, ...]


def _row_backward(
    part: Part, row: tuple[Tile, ...], inputs: _Inputs, outs: tuple[Tensor, ...], grads: _Gradients
) -> None:
    """Adds the gradients of one row."""
    raw_queries, bands = part.queries(inputs.q, row[0]), inputs.bands
    grad_out, shift, lse = (part.queries(x, row[0]) for x in outs)
    queries_t, grad_out_t = raw_queries.mT.contiguous(), grad_out.mT.contiguous()
    queries = raw_queries * part.factor
    content = None if bands is None else bands.content(row[0], raw_queries)
    grad_queries: Tensor | None = None
    grad_content: Tensor | None = None
    for tile in row:
        tile_k = take(inputs.k, tile.keys)
        evaluation, scores = None, _raw(part, bands, tile, queries, tile_k, content)
        if part.request.score_mod is None:
            scores = part.forbid(tile, scores)
        else:
            arguments = part.mod_arguments(tile, scores)
            evaluation = Evaluation(part.request.score_mod, inputs.tables, *arguments)
            scores = part.finish(tile, evaluation.value.detach())
        weights = scores.sub_(lse).exp2_()
        grad = part.product("gradient", grad_out, take(inputs.v, tile.keys).mT)
        keep = part.kept(weights) if part.request.dropout else None
        kept = weights if keep is None else weights * keep
        if bands is not None and bands.bands.values is not None:
            bands.add_values_gradient(grad, tile, grad_out, kept)
        if keep is not None:
            grad = grad.mul_(keep)
        give(grads.v, tile.keys, product(grad_out_t, kept))
        grad = grad.sub_(shift).mul_(weights)
        if evaluation is not None:
            grad = evaluation.backward(part.tiled(tile, grad), grads.tables).reshape(grad.shape)
        give(grads.k, tile.keys, product(queries_t, grad))
        grad_queries = _sum(grad_queries, product(grad, tile_k))
        if bands is not None and content is not None:
            more, of_keys = bands.backward(tile, grad, content, tile_k)
            grad_content = more if more is None else _sum(grad_content, more)
            if of_keys is not None:
                give(grads.k, tile.keys, of_keys)
    assert grad_queries is not None, "a row has at least one tile"
    if bands is not None and grad_content is not None:
        grad_queries = bands.give_content(row[0], grad_content, grad_queries)
    part.put(grads.q, row[0], grad_queries)


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)
