"""Attention over windows in a sorted order with the terms of a position scheme, round by round.

    y_i = sum_r e^(l_ir - l_i) o_ir        l_i = log sum_r e^(l_ir)

o_ir and l_ir are the output and the log-sum-exp of query i over its window in round r, without the keys of
its windows in earlier rounds. Blocks are the same as in `WindowBlocks`; their scores are in the order of
buckets, so the scheme's tables are looked up pair by pair (`tile_attention`). Cost: the same as
`sorted_attention`, plus the lookups.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.lsh.sorted_window import WindowBlocks, Windows
from polyformer.attention.mechanisms.pair_terms import (
    Pairs,
    PairTerms,
    PairTiles,
    TokenRows,
    max_elements,
    tile_attention,
)
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


class SortedSlots(NamedTuple):
    """The tokens of all heads in the order of a round.

    order: [B H, Tk], their slots. spots: [rounds, B H Tk], of every token in this and in earlier rounds.
    """

    order: Tensor
    spots: Tensor
    windows: Windows


@torch.compiler.disable(reason="windows are walked in Python")
def sorted_attention_with_terms(heads: Heads, windows: Windows, context: Context, terms: PairTerms) -> Tensor:
    """Return the output [B, H, Tq, Dv] of q [B, H, Tq, D] over k [B, H, Tk, D] and v [B, H, Tk, Dv].

    q, k and v belong to the same tokens. A token attends to itself only if it sees no other key. Padding
    gives zeros.
    """
    q, k, v = heads
    batch, count, length = k.shape[:3]
    rows = TokenRows(*(x.flatten(0, 2) for x in (q, terms.content(q), k, v)))
    blocks = WindowBlocks(windows, length, attend_self=False, like=q)
    outputs, sums, seen = [], [], torch.zeros(batch * count, length, dtype=torch.bool, device=q.device)
    for number in range(windows.order.shape[2]):
        order = windows.order[:, :, number].flatten(0, 1)  # [B H, Tk]
        spots = windows.spots.int().flatten(0, 1).transpose(0, 1)[: number + 1].flatten(1)  # [rounds, B H Tk]
        slots = SortedSlots(order, spots, windows)
        parts = [tile_attention(rows, tiles, terms) for tiles in _tiles(slots, blocks, q, context, terms)]
        place = order.argsort(1)
        out, lse, some = (
            torch.cat(x).flatten(0, 1).unflatten(0, (batch * count, -1))[:, :length] for x in zip(*parts)
        )
        outputs.append(out.gather(1, place.unsqueeze(-1).expand_as(out)))
        sums.append(lse.gather(1, place))
        seen |= some.gather(1, place)
    # Combine the rounds: a softmax over their log-sum-exp weighs the outputs of each round.
    lse = torch.stack(sums, -1)
    weights, _ = softmax(lse, lse > -torch.inf)
    out = (weights.unsqueeze(-2) @ torch.stack(outputs, -2)).squeeze(-2)
    out = torch.where(seen.unsqueeze(-1), out, _self_output(v, terms).flatten(0, 1))
    out = out.unflatten(0, (batch, count))
    if context.kv_valid is not None:
        out = out.masked_fill(~context.kv_valid[:, None, :, None], 0)
    return out[:, :, context.offset : context.offset + context.q_len]


def _tiles(
    slots: SortedSlots, blocks: WindowBlocks, q: Tensor, context: Context, terms: PairTerms
) -> Iterator[PairTiles]:
    """Yield the blocks of a round of all heads, in groups that fit into memory limits."""
    order, spots, windows = slots
    heads, length = q.shape[1], order.shape[1]
    # Slots of queries [n, Q] and keys [n, L], -1 where a block is not full.
    # `blocks` pads with zeros; the shift by 1 turns them into -1.
    queries = (blocks.queries((order + 1).unsqueeze(-1)) - 1).flatten(0, 1).squeeze(-1)
    keys = (blocks.keys((order + 1).unsqueeze(-1)) - 1).flatten(0, 1).squeeze(-1)
    own = torch.arange(len(order), device=order.device).repeat_interleave(blocks.count).unsqueeze(1)
    step = max(1, max_elements(q, terms) // terms.size(queries.shape[1], keys.shape[1]))
    for query, key, row in zip(*(x.split(step) for x in (queries, keys, own))):
        # A key of the past has no query: it gets a dummy query that is dropped at the end.
        q_idx = (query - context.offset).clamp(0, context.q_len - 1)
        key_row = row * length + key.clamp_min(0)
        query_spots, key_spots = spots[:, row * length + query.clamp_min(0)], spots[:, key_row]
        own = query.int().unsqueeze(-1), key.int().unsqueeze(1), query_spots, key_spots
        b, h, i = (x.unsqueeze(-1) for x in (row // heads, row % heads, q_idx))
        pairs = Pairs(b, h, i, key.clamp_min(0).unsqueeze(1))
        allowed = functools.partial(_visible, windows, *own)
        yield PairTiles(row * context.q_len + q_idx, key_row, pairs, allowed)


def _visible(windows: Windows, query: Tensor, key: Tensor, query_spots: Tensor, key_spots: Tensor) -> Tensor:
    """Return a mask [n, Q, L] for slots [n, Q, 1] and [n, 1, L], given their spots in all rounds so far.

    The spots are [r, n, Q or L]. Keys seen in an earlier round are masked.
    """
    *earlier, own = (windows.sees(q.unsqueeze(-1), k.unsqueeze(1)) for q, k in zip(query_spots, key_spots))
    seen = own & (query != key) & (query >= 0) & (key >= 0)
    for other in earlier:
        seen &= ~other
    return seen


def _self_output(v: Tensor, terms: PairTerms) -> Tensor:
    """Return the output of tokens that attend only to themselves: v plus the position value of distance 0."""
    relative = terms.relative
    if relative is None or relative.position_values is None:
        return v
    own = relative.entry(torch.zeros(1, dtype=torch.long, device=v.device))
    return v + relative.position_values[:, own]
