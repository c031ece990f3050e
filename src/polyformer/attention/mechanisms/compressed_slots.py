"""The tokens that a strided convolution combines into each slot, and the queries that attend to the slot.

Positions are counted per document over non-padding tokens, so padding and packing have no influence. The
window of slot s has the tokens s * stride .. s * stride + kernel - 1 of a document. In the causal form a slot
is complete once its last token has come, and that token and later ones attend to it; each document also has a
slot for its first token only, so that every token has a slot to attend to. Otherwise the windows that the end
of a document cuts off treat the missing tokens as zeros. Cost: a few integers per token.

With the terms of a position scheme a slot has its last token's position. Slots are several tokens apart, so
that no diagonal of scores shares a distance: the tables of a scheme are looked up pair by pair. Biases and
functions of scores become a `score_mod` of `attend`; vectors that are multiplied with queries or keys or
added to outputs are looked up for runs of queries (`tile_attention`). Cost: the same as without terms, n /
stride keys per query, plus the lookups; memory of a run's scores.
"""

import dataclasses
from bisect import bisect_right

import torch
from torch import Tensor

from polyformer.attention.functional.documents import token_ranks
from polyformer.attention.mechanisms.base import Heads
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
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step, steps_of
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import recording, softmax
from polyformer.core.sequence.context import Context

NO_SLOT = 1 << 60
"""The end of a slot that no query attends to."""


@dataclasses.dataclass(frozen=True, eq=False)
class SlotWindows:
    """New slots computed from J tokens, with the new tokens last; R is 1 if all rows have the same layout.

    Args:
        index: [R, S, kernel], which of the J tokens each slot has; J for missing tokens.
        unconvolved: [R, S], whether the slot is only the last of these tokens, without convolution.
        ends: [R, S], the key slot of its last token, which completes it; `NO_SLOT` if there is no slot.
        tail: [R, kernel - 1], which of the J tokens later windows may still need: the last non-padding ones.
        tail_slots: [R, kernel - 1], their key slots, -1 where there are fewer.
    """

    index: Tensor
    unconvolved: Tensor
    ends: Tensor
    tail: Tensor
    tail_slots: Tensor

    def tokens(self, count: int) -> Tensor:
        """Return the range of tokens start <= j < stop of each slot, [R, S, 2], or 0, 0 for empty slots.

        The slots must be computed from all `count` tokens of the sequence.
        """
        none = (self.index >= count) | (self.ends == NO_SLOT).unsqueeze(2)
        least, most = self.index.masked_fill(none, count).amin(2), self.index.masked_fill(none, -1).amax(2)
        return torch.stack([least, most + 1], 2) * (most >= 0).unsqueeze(2)


def new_slots(context: Context, slots: Tensor, fresh: int, kernel: int, stride: int) -> SlotWindows:
    """Return the slots that new tokens create.

    slots: [R, J], the key slots of the tokens, -1 for none; the last `fresh` of them are new.
    """
    rows, count = slots.shape
    places = slots.clamp_min(0)
    real, rank, doc = (
        table.expand(rows, -1).gather(1, places) for table in token_ranks(context, slots.device)
    )
    real = real & (slots >= 0)
    order = (~real).long().argsort(dim=1, stable=True)  # non-padding tokens first
    at = real.long().cumsum(1) - 1  # the index of each token in that order
    if context.causal:
        full = real & (rank >= kernel - 1) & ((rank + 1 - kernel) % stride == 0)
        # Two kinds of slots per token, interleaved: its document's first-token slot, and the window it
        # completes.
        events = torch.stack([real & (rank == 0), full], 2)[:, count - fresh :].flatten(1)
        offsets = torch.arange(1 - kernel, 1, device=slots.device)
    else:
        events = (real & (rank % stride == 0))[:, count - fresh :]
        offsets = torch.arange(kernel, device=slots.device)
    most = _max_slots(events, context, fresh, kernel, stride)
    # A stable sort moves the slots that exist to the front and keeps the order of their tokens.
    chosen = (~events).long().argsort(dim=1, stable=True)[:, :most]
    exists, kinds = events.gather(1, chosen), 2 if context.causal else 1
    token = chosen // kinds + count - fresh  # [R, S]
    near = (at.gather(1, token).unsqueeze(2) + offsets).clamp(0, count - 1)  # among non-padding tokens
    index = order.gather(1, near.flatten(1)).view(near.shape)
    if not context.causal:
        inside = at.gather(1, token).unsqueeze(2) + offsets < real.sum(1).view(-1, 1, 1)
        same = doc.gather(1, index.flatten(1)).view(index.shape) == doc.gather(1, token).unsqueeze(2)
        index = index.masked_fill(~(inside & same), count)
        last = (index < count).sum(2, keepdim=True).sub(1).clamp_min(0)
        token = index.gather(2, last).squeeze(2).clamp_max(count - 1)
    unconvolved = (chosen % 2 == 0) & exists if context.causal else torch.zeros_like(exists)
    index = torch.where(unconvolved.unsqueeze(2), token.unsqueeze(2), index)
    ends = slots.gather(1, token).masked_fill(~exists, NO_SLOT)
    # The last kernel - 1 in an order with non-padding tokens at its end.
    tail = real.long().argsort(dim=1, stable=True)[:, max(0, count - kernel + 1) :]
    tail = torch.nn.functional.pad(tail, (kernel - 1 - tail.shape[1], 0))
    known = torch.arange(kernel - 2, -1, -1, device=slots.device) < real.sum(1, keepdim=True)
    tail_slots = slots.gather(1, tail).masked_fill(~known, -1)
    return SlotWindows(index, unconvolved, ends, tail, tail_slots)


def _max_slots(events: Tensor, context: Context, fresh: int, kernel: int, stride: int) -> int:
    """Return the maximum number of slots per row, at least 1."""
    if context.kv_valid is None and context.kv_doc is None:  # no read of the tensors needed
        last, past = context.kv_len, context.kv_len - fresh
        if not context.causal:
            return max(1, -(-last // stride) - -(-past // stride))
        full = [max(0, (length - kernel) // stride + 1) for length in (last, past)]
        return max(1, full[0] - full[1] + (past == 0))
    if torch.compiler.is_compiling():  # values cannot be read while tracing
        return events.shape[1]
    return max(1, int(events.sum(1).max()))


@dataclasses.dataclass(frozen=True, eq=False)
class VisibleSlots:
    """Mask and layout of the slots for `attend`, which are complete at `ends` [R, S]."""

    context: Context
    ends: Tensor
    docs: Tensor | None  # [B, S] of the slots
    memo: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, context: Context, ends: Tensor) -> "VisibleSlots":
        """Return the mask and layout for the queries of `context`."""
        docs = context.kv_doc
        if docs is not None:
            docs = docs.gather(1, ends.expand(len(docs), -1).clamp(max=context.kv_len - 1))
        return cls(context, ends.expand(len(ends) if docs is None else len(docs), -1), docs)

    @broadcasts
    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether each query attends to each slot, as a FlexAttention `mask_mod`."""
        row = b if len(self.ends) > 1 else torch.zeros_like(b)
        ends = self.ends[row, kv_idx]
        seen = ends <= q_idx + self.context.offset if self.context.causal else ends < NO_SLOT
        if self.docs is not None and self.context.q_doc is not None:
            seen = seen & (self.docs[b, kv_idx] == self.context.q_doc[b, q_idx])
        return seen

    def keys(self, start: int, stop: int) -> Keys:
        """Return the slots that the queries start..stop require."""
        least, greatest = self._limits()
        last = stop - 1 + self.context.offset if self.context.causal else NO_SLOT - 1
        first = start + self.context.offset if self.context.causal else NO_SLOT - 1
        some = clip(0, bisect_right(least, last), len(least))
        return Keys(some, () if self.docs is not None else clip(0, bisect_right(greatest, first), len(least)))

    def _limits(self) -> tuple[list[int], list[int]]:
        """Return, for each slot, the minimum of `ends` from it on and the maximum up to it, over all rows.

        Both are non-decreasing, so `keys` can search them by bisection.
        """
        if not self.memo:
            ends = self.ends
            if ends.is_meta:  # without numbers: of a text without padding, whose slots end at even distances
                slots = torch.arange(1, ends.shape[1] + 1, device="cpu")
                ends = (slots * self.context.kv_len // len(slots) - 1).unsqueeze(0)
            least = ends.amin(0).flip(0).cummin(0).values.flip(0)
            self.memo.append((least.tolist(), ends.amax(0).cummax(0).values.tolist()))
        return self.memo[0]


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
