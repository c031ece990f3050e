"""Which tokens a strided convolution takes into a slot, and which queries attend to it.

Tokens are counted in their own document, real ones alone, so padding and packing change nothing. The window
of slot s has the tokens s * stride .. s * stride + kernel - 1 of a document. With causality a window is
there once its last token is, and later queries attend to it; before the first of them a document has a
slot for its first token alone, so that no token has nothing to attend to. Without, windows that the end of a
document cuts off count nothing for what they lack. Cost: a few integers a token.
"""

import dataclasses
from bisect import bisect_right

import torch
from torch import Tensor

from polyformer.patterns.layout import Keys, clip
from polyformer.patterns.mods import broadcasts
from polyformer.sequence.context import Context
from polyformer.sequence.documents import token_ranks

NEVER = 1 << 60
"""The end of a slot that no query attends to."""


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
    """New slots made of J tokens, the last of which are the new ones; R is 1 where all rows are alike.

    Args:
        index: [R, S, kernel], which of the J tokens each has; J for none.
        alone: [R, S], whether it is the last of these tokens alone.
        ends: [R, S], the key slot of its last token, which completes it, `NEVER` where there is no such slot.
        kept: [R, kernel - 1], which of the J tokens the next windows may still need: the last real ones.
        kept_slots: [R, kernel - 1], their key slots, -1 where there are fewer.
    """

    index: Tensor
    alone: Tensor
    ends: Tensor
    kept: Tensor
    kept_slots: Tensor

    def tokens(self, count: int) -> Tensor:
        """Of new slots of all `count` tokens: which start <= j < stop each has, [R, S, 2]; none: 0, 0."""
        none = (self.index >= count) | (self.ends == NEVER).unsqueeze(2)
        least, most = self.index.masked_fill(none, count).amin(2), self.index.masked_fill(none, -1).amax(2)
        return torch.stack([least, most + 1], 2) * (most >= 0).unsqueeze(2)


def new_slots(context: Context, slots: Tensor, fresh: int, kernel: int, stride: int) -> Slots:
    """Of the tokens in the key slots `slots` [R, J], -1 for none; the last `fresh` of them are new."""
    rows, count = slots.shape
    places = slots.clamp_min(0)
    real, rank, doc = (
        table.expand(rows, -1).gather(1, places) for table in token_ranks(context, slots.device)
    )
    real = real & (slots >= 0)
    order = (~real).long().argsort(dim=1, stable=True)  # real tokens first
    at = real.long().cumsum(1) - 1  # where a token stands in that order
    if context.causal:
        full = real & (rank >= kernel - 1) & ((rank + 1 - kernel) % stride == 0)
        events = torch.stack([real & (rank == 0), full], 2)[:, count - fresh :].flatten(1)
        offsets = torch.arange(1 - kernel, 1, device=slots.device)
    else:
        events = (real & (rank % stride == 0))[:, count - fresh :]
        offsets = torch.arange(kernel, device=slots.device)
    most = _most(events, context, fresh, kernel, stride)
    chosen = (~events).long().argsort(dim=1, stable=True)[:, :most]
    live, kinds = events.gather(1, chosen), 2 if context.causal else 1
    token = chosen // kinds + count - fresh  # [R, S]
    near = (at.gather(1, token).unsqueeze(2) + offsets).clamp(0, count - 1)  # in the order of real tokens
    index = order.gather(1, near.flatten(1)).view(near.shape)
    if not context.causal:
        inside = at.gather(1, token).unsqueeze(2) + offsets < real.sum(1).view(-1, 1, 1)
        same = doc.gather(1, index.flatten(1)).view(index.shape) == doc.gather(1, token).unsqueeze(2)
        index = index.masked_fill(~(inside & same), count)
        last = (index < count).sum(2, keepdim=True).sub(1).clamp_min(0)
        token = index.gather(2, last).squeeze(2).clamp_max(count - 1)
    alone = (chosen % 2 == 0) & live if context.causal else torch.zeros_like(live)
    index = torch.where(alone.unsqueeze(2), token.unsqueeze(2), index)
    ends = slots.gather(1, token).masked_fill(~live, NEVER)
    # The last kernel - 1 in an order with real tokens at its end.
    kept = real.long().argsort(dim=1, stable=True)[:, max(0, count - kernel + 1) :]
    kept = torch.nn.functional.pad(kept, (kernel - 1 - kept.shape[1], 0))
    known = torch.arange(kernel - 2, -1, -1, device=slots.device) < real.sum(1, keepdim=True)
    kept_slots = slots.gather(1, kept).masked_fill(~known, -1)
    return Slots(index, alone, ends, kept, kept_slots)


def _most(events: Tensor, context: Context, fresh: int, kernel: int, stride: int) -> int:
    """The most slots that a row gets, 1 at least."""
    if context.kv_valid is None and context.kv_doc is None:  # without a look at the tensors
        last, past = context.kv_len, context.kv_len - fresh
        if not context.causal:
            return max(1, -(-last // stride) - -(-past // stride))
        full = [max(0, (length - kernel) // stride + 1) for length in (last, past)]
        return max(1, full[0] - full[1] + (past == 0))
    if torch.compiler.is_compiling():  # nothing can be read while a graph is traced
        return events.shape[1]
    return max(1, int(events.sum(1).max()))


@dataclasses.dataclass(frozen=True, eq=False)
class Sight:
    """The slots, complete at `ends` [R, S], that queries attend to: mask and layout for `attend`."""

    context: Context
    ends: Tensor
    docs: Tensor | None  # [B, S] of the slots
    memo: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, context: Context, ends: Tensor) -> "Sight":
        """For the queries of `context`."""
        docs = context.kv_doc
        if docs is not None:
            docs = docs.gather(1, ends.expand(len(docs), -1).clamp(max=context.kv_len - 1))
        return cls(context, ends.expand(len(ends) if docs is None else len(docs), -1), docs)

    @broadcasts
    def mask(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """A FlexAttention `mask_mod`."""
        row = b if len(self.ends) > 1 else torch.zeros_like(b)
        ends = self.ends[row, kv_idx]
        seen = ends <= q_idx + self.context.offset if self.context.causal else ends < NEVER
        if self.docs is not None and self.context.q_doc is not None:
            seen = seen & (self.docs[b, kv_idx] == self.context.q_doc[b, q_idx])
        return seen

    def keys(self, start: int, stop: int) -> Keys:
        """The slots that the queries start..stop need."""
        least, greatest = self._limits()
        last = stop - 1 + self.context.offset if self.context.causal else NEVER - 1
        first = start + self.context.offset if self.context.causal else NEVER - 1
        some = clip(0, bisect_right(least, last), len(least))
        return Keys(some, () if self.docs is not None else clip(0, bisect_right(greatest, first), len(least)))

    def _limits(self) -> tuple[list[int], list[int]]:
        """For each slot the least end from it on, over the rows, and the greatest up to it: both rise."""
        if not self.memo:
            least = self.ends.amin(0).flip(0).cummin(0).values.flip(0)
            self.memo.append((least.tolist(), self.ends.amax(0).cummax(0).values.tolist()))
        return self.memo[0]
