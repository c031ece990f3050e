"""The base of cache policies, and the state of a layer with a budget of keys per head.

Kept keys are at other places in each head, and so are their biases by distance:

    score_ij = q_i . k_j * scale + bias_h[slot(i) - slot_h(j)]

Elsewhere all heads share the keys, and the biases of a diagonal are equal (`Relative`). Here each entry is
looked up by the tokens that a head kept, which is cheap for the few queries of a step of decoding.

A policy decides how the KV cache of a layer begins (`CachePolicy.new_state`). A `DroppingPolicy` works so:

    in a call      queries see the kept keys and the keys of the call
    after it       the policy scores all keys; each head keeps the `budget` keys with the highest scores

A kept key keeps its rotation, and new tokens keep the positions of the full text. Attention with a policy is
therefore dense attention in which the dropped keys are masked, for each layer and head.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.positions import BoundPosition
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import Int8Cache, KeyValueCache, PairCache
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates


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


def among_last(valid: Tensor, count: int | None) -> Tensor:
    """Return which tokens are among the last `count` of their row that are not padding; None for all."""
    real = valid.bool()
    return real if count is None else real & (from_end(real) <= count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePolicy(Config):
    """Family of cache policies: which keys of each layer the KV cache keeps, and how.

    `drops_keys`: whether heads may keep other keys than other heads. `after_every_call`: whether keys are
    dropped after every call; otherwise only after the first, which reads the prompt, and the keys of later
    tokens are all kept. `supports_score_bias`: whether keys are chosen with biases such as ALiBi's.
    """

    option: ClassVar[str] = "cache"
    drops_keys: ClassVar[bool] = False
    after_every_call: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = True

    def new_state(self, reserve: int) -> State:
        """Return the state of a layer before the first token, with space for `reserve` tokens."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DroppingPolicy(CachePolicy):
    """Base of the policies by which each layer and key head keeps `budget` keys.

    `int8`: whether they are kept as integers, as with the policy `int8`.
    """

    budget: PositiveInt = 1024
    int8: bool = False

    drops_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        always = sum(self.always())
        if always >= self.budget:
            raise InputError(
                f"budget: expected more keys than the {always} that {quote(self.kind)} always keeps, got "
                f"{self.budget}; raise the budget"
            )

    def new_state(self, reserve: int) -> "CompressedCache":
        cache = Int8Cache.empty(reserve) if self.int8 else KeyValueCache(reserve=reserve)
        return CompressedCache(self, cache)

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the scores [B, Hkv, Tk] of all keys; higher scores are kept first.

        past: the scores of the keys before the call, with `after_every_call`; None in the first call.
        """
        raise NotImplementedError

    def always(self) -> tuple[int, int]:
        """Return the numbers of first tokens of a text and of last tokens that are never dropped."""
        return 0, 0

    def kept(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """Return the keys that each head keeps, in order: indices [B, Hkv, budget], padding first.

        scores: [B, Hkv, Tk]. valid: [B, Tk], False for padding, which is dropped before any other key.
        """
        first, last = self.always()
        length = scores.shape[-1]
        slots = torch.arange(length, device=scores.device)
        place = slots.unsqueeze(0) if valid is None else valid.cumsum(-1) - 1
        latest = slots >= length - last if valid is None else among_last(valid, last)
        always = ((place < first) | latest).unsqueeze(1)
        scores, order = scores.masked_fill(always, torch.inf), slots.expand_as(scores)
        if valid is not None:
            scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
            order = order + length * valid.unsqueeze(1)
        # Stable, as neighbours pooled by their maximum are equal: the earlier key is kept.
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.budget]
        return best.gather(-1, order.gather(-1, best).argsort(-1))


@dataclasses.dataclass(frozen=True)
class CompressedCache(StateOfStates):
    """The KV cache of a layer with a policy.

    kept: [B, Hkv, K], the tokens of the text that the first K keys belong to; None before any is dropped.
    scores: [B, Hkv, held], for a policy that adds to them. seen: tokens of the text when `kept` was chosen.
    """

    policy: DroppingPolicy
    cache: PairCache
    kept: Tensor | None = None
    scores: Tensor | None = None
    seen: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.policy, DroppingPolicy):  # read from a file
            object.__setattr__(self, "policy", CachePolicy.from_dict(self.policy))

    @property
    def slots(self) -> Tensor | None:
        """The tokens of the text that each head has keys of: [B, Hkv, held]; None if it has all."""
        return None if self.kept is None else self._slots(self.kept, self.cache.held)

    @property
    def dropped(self) -> int:
        """The number of tokens, padding included, that each head has dropped."""
        return 0 if self.kept is None else self.seen - self.kept.shape[-1]

    def __str__(self) -> str:
        """Return how many tokens of the first text the heads keep, and how many of these are the same."""
        if self.slots is None:
            return f"{self.policy.kind}: all {self.cache.held:,} tokens"
        heads, held = self.slots.shape[1:]
        seen = self.dropped + held
        count = self.slots[0].flatten().bincount(minlength=seen)
        shared, gone = int((count == heads).sum()), int((count == 0).sum())
        return (
            f"{self.policy.kind}: each head keeps {held:,} of {seen:,} tokens, {shared:,} of them in all "
            f"{heads} heads; {gone:,} are in none"
        )

    def distances(self, terms: BoundPosition, k: Tensor) -> KeptDistances:
        """Return the terms of a scheme with `adds_bias`, in a call that appends keys k [B, Hkv, T, D]."""
        held = self.cache.held + k.shape[2]
        kept = k.new_empty(*k.shape[:2], 0, dtype=torch.long) if self.kept is None else self.kept
        return KeptDistances(terms, self._slots(kept, held), held + self.dropped)

    def _slots(self, kept: Tensor, held: int) -> Tensor:
        """Return the tokens of `held` keys: those of `kept` [B, Hkv, K], and the last tokens of the text."""
        new = torch.arange(held - kept.shape[-1], device=kept.device) + self.dropped + kept.shape[-1]
        return torch.cat([kept, new.expand(*kept.shape[:2], -1)], -1)

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the keys that this cache has, in a call that appends the keys of its queries.

        context: of all tokens of the text.
        """
        if self.kept is None:
            return context
        return context.once(("compressed", self.dropped), lambda: self._context(context, device))

    def _context(self, context: Context, device: torch.device) -> Context:
        valid, q_pos = context.kv_valid, context.q_pos
        if valid is not None:
            # Padding is dropped first, and what remains of it comes first.
            kept, valid = self.seen - self.dropped, valid.bool()
            real = valid[:, : self.seen].sum(-1, keepdim=True)
            valid = torch.cat([torch.arange(kept, device=device) >= kept - real, valid[:, self.seen :]], 1)
        if q_pos is None:
            q_pos = torch.arange(context.offset, context.kv_len, device=device)
        length = context.kv_len - self.dropped
        return Context(context.q_len, length, causal=context.causal, q_pos=q_pos, kv_valid=valid)

    def attend(
        self,
        mechanism: Callable[..., tuple[Tensor, State | None]],
        scale: float,
        queries: tuple[Tensor, Tensor],
        pair: tuple[Tensor, Tensor],
        context: Context,
        terms: BoundPosition,
    ) -> tuple[Tensor, "CompressedCache"]:
        """Return the output of softmax attention with this cache, and the state after the policy's choice.

        scale: of scores. queries: [B, H, Tq, D], rotated and before positions. pair: the new keys, rotated,
        and values.
        """
        (q, unrotated), (k, v) = queries, pair
        position, site = terms.position, terms.site
        distances = self.distances(terms, k) if position.adds_bias else None
        # Before any key is dropped all heads have the same distances.
        kept_terms = terms if distances is None or self.kept is None else distances
        y, cache = mechanism(q, k, v, context, self.cache, kept_terms)
        assert isinstance(cache, PairCache)
        turn = lambda x, context: position.rotate(x, x, context, site)[0]  # noqa: E731
        mod = None if distances is None else distances.score_mod(q, k, context)
        return y, self.after(CacheCall(q, unrotated, cache, context, scale, turn, mod))

    def after(self, call: CacheCall) -> "CompressedCache":
        """Return the state after a call."""
        policy, cache, held = self.policy, call.cache, call.cache.held
        if not policy.after_every_call and (self.seen or held <= policy.budget):
            return dataclasses.replace(self, cache=cache, seen=self.seen or held)
        _check(policy, call.context)
        seen, scores = self.dropped + held, policy.scores(call, self.scores)
        if held <= policy.budget:
            return dataclasses.replace(self, cache=cache, scores=scores, seen=seen)
        valid = call.context.kv_valid
        index = policy.kept(scores, None if valid is None else valid.bool())
        slots = dataclasses.replace(self, cache=cache).slots
        return CompressedCache(
            policy,
            cache.gathered(index),
            kept=index if slots is None else slots.gather(-1, index),
            scores=scores.gather(-1, index) if policy.after_every_call else None,
            seen=seen,
        )

    def reorder_(self, index: Tensor) -> "CompressedCache":
        """Return the batch rows `index`; the cache may write to its spare buffers."""
        return self._each(lambda tensor: tensor.index_select(0, index), lambda state: state.reorder_(index))

    def truncated_(self, count: int) -> "CompressedCache | None":
        """Remove the last `count` tokens; None if keys were dropped for them."""
        return None if self.policy.after_every_call else super().truncated_(count)


def _changed(scores: Tensor, score_mod: ScoreMod, start: int) -> Tensor:
    """Return changed scores [B, Hkv, H / Hkv, T, Tk] of the queries from `start` on."""
    heads = scores.flatten(1, 2)
    sizes = zip((0, 0, start, 0), heads.shape)
    b, h, q_idx, kv_idx = (torch.arange(first, first + size, device=scores.device) for first, size in sizes)
    places = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q_idx.view(-1, 1), kv_idx
    return score_mod(heads, *places).view_as(scores)


def _check(policy: DroppingPolicy, context: Context) -> None:
    """Raise `InputError` for a call with tables that kept keys of single heads do not have."""
    tables = {
        "document_ids": context.kv_doc,
        "segment_ids": context.kv_segment,
        "global_attention_mask": context.kv_marked,
        "relation_ids": context.relations,
        "context parallelism": context.shard,
    }
    for name, table in tables.items():
        if table is not None:
            raise InputError(
                f"cache: {quote(policy.kind)} keeps other keys in each head, which {name} would need too; "
                f"leave out the cache, or {name}"
            )
