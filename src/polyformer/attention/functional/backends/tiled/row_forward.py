"""The forward pass of a row of tiles: a run of queries and all keys that they need.

For the scores of each tile, with m the largest score of a query so far and s the sum so far (Dao et al. 2022,
FlashAttention, algorithm 1):

    m' = max(m, max_j score_ij)        p_ij = 2^(score_ij - m')
    s' = s 2^(m - m') + sum_j p_ij     out' = out 2^(m - m') + sum_j p_ij v_j         at the end out / s

If no score can be far from 0, m = 0: the powers neither overflow nor vanish, and no subtraction is needed.
The backward pass needs m and s: of large scores, m + log2(s) is rounded too coarsely for an exponent.
"""

import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.relative_terms import RelativeTerms
from polyformer.attention.functional.backends.tiled.tiles import Tile, take
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
