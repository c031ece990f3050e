"""A row of tiles, forward and backward: a run of queries and all keys that they need.

For the scores of each tile, with m the largest score of a query so far and s the sum so far (Dao et al. 2022,
FlashAttention, algorithm 1):

    m' = max(m, max_j score_ij)        p_ij = 2^(score_ij - m')
    s' = s 2^(m - m') + sum_j p_ij     out' = out 2^(m - m') + sum_j p_ij v_j         at the end out / s

If no score can be far from 0, m = 0: the powers neither overflow nor vanish, and no subtraction is needed.
The backward pass needs m and s: of large scores, m + log2(s) is rounded too coarsely for an exponent.

The backward pass recomputes the scores. With p_ij = e^(score_ij - lse_i) and out_i = sum_j p_ij v_j (Dao et
al. 2022, FlashAttention, algorithm 4):

    grad_v_j      = sum_i p_ij grad_out_i                    grad_p_ij = grad_out_i . v_j
    grad_score_ij = p_ij (grad_p_ij - shift_i)               shift_i   = grad_out_i . out_i - grad_lse_i
    grad_q_i      = scale sum_j grad_score_ij k_j            grad_k_j  = scale sum_i grad_score_ij q_i

shift_i contains all paths through the denominator, as sum_j p_ij grad_p_ij = grad_out_i . out_i, and the path
through lse_i itself. Dropout multiplies p_ij by `keep` in the first line. The caller multiplies by the scale.

p_ij = e^(score_ij - m_i) / s_i with the maximum m and the sum s of the forward pass. The caller divides
grad_out_i and shift_i by s_i, which is the same in all lines and costs no operation per pair.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.relative_terms import RelativeGradients, RelativeTerms
from polyformer.attention.functional.backends.tiled.score_mod_gradients import Evaluation
from polyformer.attention.functional.backends.tiled.tiles import Tile, add_columns, take
from polyformer.attention.functional.backends.tiled.work_items import WorkItem


def row_forward(
    item: WorkItem, terms: RelativeTerms | None, row: tuple[Tile, ...], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return output, m and s of a row, [N, G * queries, Dv or 1], summed tile by tile; None for m = 0."""
    queries = item.queries(q, row[0])
    content = None if terms is None else terms.content(row[0], queries)
    queries = queries * item.factor
    lowest, tiny = torch.finfo(q.dtype).min, torch.finfo(q.dtype).tiny
    top = fade = total = value = None
    for tile in row:
        scores = scores_before_mod(item, terms, tile, queries, take(k, tile.keys), content)
        if item.request.score_mod is None:
            scores = item.forbid(tile, scores)
        else:
            scores = item.finish(tile, item.request.score_mod(*item.mod_arguments(tile, scores)))
        if not item.small_scores:
            # The clamp keeps a fully masked row finite: exp2(-inf - lowest) = 0 instead of NaN.
            peak = scores.amax(-1, keepdim=True).clamp_(min=lowest)
            if top is not None:
                # m' = max(m, max_j score_ij), and the factor of the sums so far.
                peak = torch.maximum(top, peak)
                fade = torch.exp2(top - peak)
            scores, top = scores.sub_(peak), peak
        weights = scores.exp2_()
        mass = weights.sum(-1, keepdim=True)
        # After the sum: dropout applies to the normalised weights, so the denominator keeps all of them.
        if item.request.dropout:
            weights *= item.kept(weights)
        seen = item.products(weights, take(v, tile.keys))
        if terms is not None and terms.tables.values is not None:
            seen += terms.values(tile, weights)
        if total is None or value is None:
            total, value = mass, seen
            continue
        if fade is not None:
            total, value = total.mul_(fade), value.mul_(fade)
        total, value = total.add_(mass), value.add_(seen)
    assert total is not None, "a row has at least one tile"
    assert value is not None
    return value.div_(total.clamp_min(tiny)), top, total


def scores_before_mod(
    item: WorkItem,
    terms: RelativeTerms | None,
    tile: Tile,
    queries: Tensor,
    keys: Tensor,
    content: Tensor | None,
) -> Tensor:
    """Return the scores with their relative terms, before score_mod and mask."""
    scores = item.raw(tile, queries, keys)
    if terms is not None and content is not None:
        terms.add(scores, tile, content, keys)
    return scores


class TileInputs(NamedTuple):
    """The inputs of the tiles of a work item."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: RelativeGradients | None
    tables: tuple[Tensor, ...]


class Gradients(NamedTuple):
    """The gradients of a work item; the gradients of keys and values are stored as columns, [N, D, Tk]."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: tuple[Tensor, ...]


def row_backward(
    item: WorkItem, row: tuple[Tile, ...], inputs: TileInputs, outs: tuple[Tensor, ...], grads: Gradients
) -> None:
    """Add the gradients of a row, by the equations above."""
    raw_queries, terms = item.queries(inputs.q, row[0]), inputs.terms
    grad_out, shift, peak = (item.queries(x, row[0]) for x in outs)
    # Transposed once per row, for products that add to columns.
    queries_t, grad_out_t = raw_queries.mT.contiguous(), grad_out.mT.contiguous()
    queries = raw_queries * item.factor
    content = None if terms is None else terms.content(row[0], raw_queries)
    grad_queries: Tensor | None = None
    grad_content: Tensor | None = None
    for tile in row:
        tile_k = take(inputs.k, tile.keys)
        evaluation, scores = None, scores_before_mod(item, terms, tile, queries, tile_k, content)
        if item.request.score_mod is None:
            scores = item.forbid(tile, scores)
        else:
            arguments = item.mod_arguments(tile, scores)
            evaluation = Evaluation(item.request.score_mod, inputs.tables, *arguments)
            scores = item.finish(tile, evaluation.value.detach())
        # The maximum is of all tiles of the row, so no running maximum is needed here.
        weights = scores.sub_(peak).exp2_()
        grad_weights = item.product("gradient", grad_out, take(inputs.v, tile.keys).mT)
        keep = item.kept(weights) if item.request.dropout else None
        kept = weights if keep is None else weights * keep
        if terms is not None and terms.tables.values is not None:
            terms.add_values_gradient(grad_weights, tile, grad_out, kept)
        if keep is not None:
            grad_weights = grad_weights.mul_(keep)
        add_columns(grads.v, tile.keys, item.products(grad_out_t, kept))
        # grad_score_ij = p_ij (grad_p_ij - shift_i)
        grad_scores = grad_weights.sub_(shift).mul_(weights)
        if evaluation is not None:
            grad_unmodified = evaluation.backward(item.tiled(tile, grad_scores), grads.tables)
            grad_scores = grad_unmodified.reshape(grad_scores.shape)
        add_columns(grads.k, tile.keys, item.products(queries_t, grad_scores))
        grad_queries = _sum(grad_queries, item.products(grad_scores, tile_k))
        if terms is not None and content is not None:
            more, grad_keys = terms.backward(tile, grad_scores, content, tile_k)
            grad_content = more if more is None else _sum(grad_content, more)
            if grad_keys is not None:
                add_columns(grads.k, tile.keys, grad_keys)
    assert grad_queries is not None, "a row has at least one tile"
    if terms is not None and grad_content is not None:
        grad_queries = terms.add_content_gradient(row[0], grad_content, grad_queries)
    item.put(grads.q, row[0], grad_queries)


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    """Return total + more, computed in place unless total is None."""
    return more if total is None else total.add_(more)
