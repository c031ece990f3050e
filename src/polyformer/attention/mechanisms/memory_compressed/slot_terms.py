"""Attention to compressed keys with the terms of a position scheme: a slot has its last token's position.

Slots are several tokens apart, so that no diagonal of scores shares a distance: the tables of a scheme are
looked up pair by pair. Biases and functions of scores become a `score_mod` of `attend`; vectors that are
multiplied with queries or keys or added to outputs are looked up for runs of queries
(`tile_attention`). Cost: the same as without terms, n / stride keys per query, plus the lookups; memory of a
run's scores.
"""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.memory_compressed.compression import VisibleSlots
from polyformer.attention.mechanisms.pair_terms import (
    Pairs,
    PairTerms,
    PairTiles,
    TokenRows,
    add_terms,
    max_elements,
    tile_attention,
    weighted_values,
)
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step, steps_of
from polyformer.core.ops.dropout import dropout
from polyformer.core.ops.softmax import recording, softmax

BLOCK = 128
"""Queries of a run: with fewer, the product with the slots is too small to be efficient on any processor."""


def score_mod(visible: VisibleSlots, terms: PairTerms, heads: int) -> ScoreMod | None:
    """Return the biases and score function of a scheme without vectors, for the scores of slots."""
    # A slot has the position of its last token.
    slots, relative, then = _slots(visible), terms.relative, terms.score_mod
    bias = None if relative is None or relative.bias is None else relative.bias.expand(heads, -1)

    def place(b: Tensor, kv_idx: Tensor) -> Tensor:
        return slots[0, kv_idx] if len(slots) == 1 else slots[b, kv_idx]

    @step("bias of the distance of the slot's last token")
    @broadcasts
    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert relative is not None
        assert bias is not None
        return score + bias[h, relative.entry(terms.context.distance(q_idx, place(b, kv_idx)))]

    def of_slots(mod: ScoreMod) -> ScoreMod:
        return broadcasts(lambda score, b, h, q_idx, kv_idx: mod(score, b, h, q_idx, place(b, kv_idx)))

    return chain_score_mods(
        [None if bias is None else add, *(step(name)(of_slots(mod)) for name, mod in steps_of(then))]
    )


def attend_with_terms(heads: Heads, visible: VisibleSlots, terms: PairTerms, dropped: float) -> Tensor:
    """Return the output [B, H, Tq, D] of q [B, H, Tq, D] over slots k, v [B, H, S, D] masked by `visible`.

    dropped: the dropout probability of the weights. If weights are recorded, all pairs are computed at once.
    """
    q, k, v = heads
    batch, count, queries = q.shape[:3]
    slots = _slots(visible).expand(batch, -1)
    if recording():
        return _dense(heads, visible, terms, slots, dropped)
    rows = TokenRows(*(x.flatten(0, 2) for x in (q, terms.content(q), k, v)))
    number = torch.arange(batch * count, device=q.device).view(-1, 1)
    outputs = []
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        # The slots that some query of the run sees; an empty range if there is none.
        seen = [*visible.keys(start, stop).some, (0, 0)][0]
        q_idx, key = torch.arange(start, stop, device=q.device), torch.arange(*seen, device=q.device)
        step = max(1, max_elements(q, terms) // max(1, terms.size(len(q_idx), len(key))))
        parts = []
        for row in number.split(step):
            b, h = row.unsqueeze(-1) // count, row.unsqueeze(-1) % count
            # b, h [n, 1, 1], queries [1, Q, 1] and slots of keys [n, 1, L].
            pairs = Pairs(b, h, q_idx.view(1, -1, 1), slots[b, key])

            def allowed(pairs: Pairs = pairs, key: Tensor = key) -> Tensor:
                shape = len(pairs.b), pairs.q_idx.shape[1], len(key)
                return visible.mask(pairs.b, pairs.h, pairs.q_idx, key).expand(shape)

            tiles = PairTiles(row * queries + q_idx, row * k.shape[2] + key, pairs, allowed)
            parts.append(tile_attention(rows, tiles, terms, dropped)[0])
        outputs.append(torch.cat(parts))
    return torch.cat(outputs, 1).unflatten(0, (batch, count))


def _slots(visible: VisibleSlots) -> Tensor:
    """Return the key slots of the last tokens of all slots, [R, S]; arbitrary for masked slots."""
    return visible.ends.clamp(max=visible.context.kv_len - 1)


def _dense(heads: Heads, visible: VisibleSlots, terms: PairTerms, slots: Tensor, dropped: float) -> Tensor:
    """Compute all pairs at once."""
    q, k, v = heads
    b, i, j = (torch.arange(size, device=q.device) for size in (len(q), q.shape[2], k.shape[2]))
    # [B, H, Tq, S]: all pairs, only while weights are recorded.
    scores = add_terms(q @ k.mT * terms.scale, q, k, terms, slots)
    b = b.view(-1, 1, 1, 1)
    weights, _ = softmax(scores, visible.mask(b, torch.zeros_like(b), i.unsqueeze(1), j))
    return weighted_values(dropout(weights, dropped), v, terms, slots)
