"""A call of a layer that may drop keys: weights that keys receive, and biases of keys by head.

Kept keys are at other places in each head, and so are their biases by distance:

    score_ij = q_i . k_j * scale + bias_h[slot(i) - slot_h(j)]

Elsewhere all heads share the keys, and the biases of a diagonal are equal (`Relative`). Here each entry is
looked up by the tokens that a head kept, which is cheap for the few queries of a step of decoding.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.positions import BoundPosition
from polyformer.core.kv_cache import PairCache
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class KeptDistances:
    """The bias of a scheme such as ALiBi, in the form the mechanism uses (`PositionTerms`).

    slots: [B, Hkv, Tk], the tokens of the text that the keys of a call belong to. length: tokens of the text,
    with the call's.
    """

    terms: BoundPosition
    slots: Tensor
    length: int

    farthest = None
    is_plain = False

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """Return no sets: all pairs have the same terms."""
        return ()

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return None: keys of one index have different distances in different heads."""
        return None

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod:
        """Return a function that adds bias_h[slot(i) - slot_h(j)] to the scores of q [B, H, Tq, D]."""
        # Without padding and documents: distances count slots. All layers share this context's biases.
        text = context.once(
            ("text", self.length), lambda: Context(context.q_len, self.length, causal=context.causal)
        )
        relative = self.terms.relative(q, k, text)
        assert relative is not None
        assert relative.bias is not None
        bias, groups = relative.bias.expand(q.shape[1], -1), q.shape[1] // self.slots.shape[1]

        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = q_idx + text.offset - self.slots[b, h // groups, kv_idx]
            return score + bias[h, relative.entry(distance)]

        return add


CHUNK = 1 << 22
"""Attention weights that are computed at once."""


@dataclasses.dataclass(frozen=True, eq=False)
class CacheCall:
    """A call of a layer's self-attention, after which keys may be dropped.

    queries: [B, H, Tq, D], rotated. unrotated: the same before positions. cache: the kept keys and the new.
    context: of these queries and keys. scale: of scores. rotate: a function of queries [B, H, T, D] and a
    context with their positions, that returns them rotated. score_mod: changes the scores; indices broadcast.
    """

    queries: Tensor
    unrotated: Tensor
    cache: PairCache
    context: Context
    scale: float
    rotate: Callable[[Tensor, Context], Tensor]
    score_mod: ScoreMod | None = None

    @functools.cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Keys [B, Hkv, Tk, D] and values [B, Hkv, Tk, Dv], kept and new, in the type of the queries."""
        keys, values = (x.to(self.queries.dtype) for x in self.cache.pairs())
        return keys, values

    @property
    def keys(self) -> Tensor:
        """Keys [B, Hkv, Tk, D]."""
        return self.pairs[0]

    def by_key_head(self, queries: Tensor) -> Tensor:
        """Return queries [B, H, T, D] by the key head that they read: [B, Hkv, H / Hkv, T, D]."""
        return queries.unflatten(1, (self.keys.shape[1], -1))

    def weights_received(self, last: int | None = None) -> Tensor:
        """Return the attention weights that each key gets from the last `last` queries: sums [B, Hkv, Tk].

        Sums over the queries of each row that are not padding, by default all, and over the query heads of a
        key head.
        """
        q_len, length, valid = self.context.q_len, self.keys.shape[2], self.context.kv_valid
        dtype = torch.promote_types(self.keys.dtype, torch.float32)
        total = self.keys.new_zeros(self.keys.shape[:3], dtype=dtype)
        rows = max(1, CHUNK // (self.queries.shape[0] * self.queries.shape[1] * length))
        counted = None if valid is None else among_last(valid, last)
        for start in range(self._first_counted(last), q_len, rows):
            stop = min(q_len, start + rows)
            # Keys after the last query of the chunk are hidden from all its queries.
            end = length - q_len + stop
            own, slots = slice(end - stop + start, end), torch.arange(end, device=total.device)
            hidden = slots > slots[own, None]
            if valid is not None:
                hidden = hidden | ~valid[:, None, None, None, :end].bool()
            q = self.by_key_head(self.queries[:, :, start:stop])
            scores = (q @ self.keys[:, :, :end].mT.unsqueeze(2)).to(dtype) * self.scale
            if self.score_mod is not None:
                scores = _changed(scores, self.score_mod, start)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            if counted is not None:
                weights = weights.masked_fill(~counted[:, None, None, own, None], 0.0)
            total[..., :end] += weights.sum((2, 3))
        return total

    def _first_counted(self, last: int | None) -> int:
        """Return the first query that is among the last `last` tokens of its row."""
        context, valid = self.context, self.context.kv_valid
        if last is None or valid is None:
            return 0 if last is None else max(0, context.q_len - last)
        # The layers share the answer: reading it waits for a GPU.
        queries = slice(context.offset, None)
        return context.once(
            ("first counted", last), lambda: int(among_last(valid, last)[:, queries].any(0).int().argmax())
        )


def from_end(valid: Tensor) -> Tensor:
    """Return how many tokens that are not padding a row of `valid` [B, T] has from each token on."""
    return valid.long().flip(-1).cumsum(-1).flip(-1)


def among_last(valid: Tensor, count: int | Tensor | None) -> Tensor:
    """Return which tokens are among the last `count` of their row that are not padding; None for all.

    count: a number for all rows, or [B, 1].
    """
    real = valid.bool()
    return real if count is None else real & (from_end(real) <= count)


def _changed(scores: Tensor, score_mod: ScoreMod, start: int) -> Tensor:
    """Return changed scores [B, Hkv, H / Hkv, T, Tk] of the queries from `start` on."""
    heads = scores.flatten(1, 2)
    sizes = zip((0, 0, start, 0), heads.shape)
    b, h, q_idx, kv_idx = (torch.arange(first, first + size, device=scores.device) for first, size in sizes)
    places = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx.view(-1, 1), kv_idx
    return score_mod(heads, *places).view_as(scores)
