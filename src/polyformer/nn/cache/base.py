"""The base of cache policies, and the state of a layer with a budget of keys per head.

A policy decides how the KV cache of a layer begins (`CachePolicy.new_state`). A `DroppingPolicy` works so:

    in a call      queries see the kept keys and the keys of the call
    after it       the policy scores all keys; each head keeps the `budget` keys with the highest scores

With `ratio` the budget is this share of the prompt's keys, in each row of a batch its own:

    budget = max(least, round(ratio * n)),    n tokens of the prompt

kvpress's compression ratio is the other part, 1 - ratio. A kept key keeps its rotation, and new tokens keep
the positions of the full text. Attention with a policy is therefore dense attention in which the dropped keys
are masked, for each layer and head.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from polyformer.attention.mechanisms.base import ScoreTerms
from polyformer.attention.positions import BoundPosition
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import Int8Cache, KeyValueCache, PairCache
from polyformer.core.ranges import PositiveInt, PositiveShare
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates
from polyformer.nn.cache.call import CacheCall, KeptDistances, among_last

Count = int | Tensor
"""A number for all rows of a batch, or [B, 1]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePolicy(Config):
    """Family of cache policies: which keys of each layer the KV cache keeps, and how.

    `drops_keys`: whether heads may keep other keys than other heads. `after_every_call`: whether keys are
    dropped after every call; otherwise only after the first, which reads the prompt, and the keys of later
    tokens are all kept. `supports_score_bias`: whether keys are chosen with biases such as ALiBi's.
    `has_fixed_steps`: whether a step of generation has a form of fixed size, so that it can be compiled.
    `supports_drafts`: whether tokens that are read together are read as they would be one by one.
    """

    option: ClassVar[str] = "cache"
    drops_keys: ClassVar[bool] = False
    after_every_call: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = True
    has_fixed_steps: ClassVar[bool] = False
    supports_drafts: ClassVar[bool] = True

    @property
    def basis(self) -> "CachePolicy":
        """The policy that scores the keys: this one, or the policy inside a wrapper."""
        return self

    def for_layers(self, count: int) -> Sequence["CachePolicy"]:
        """Return the policies of `count` layers, from the first on: by default the same for each."""
        return [self] * count

    def changed_by(self, share: float) -> "CachePolicy":
        """Return the policy with a budget that is larger by this share; raises `InputError` without any."""
        raise InputError(
            f"of: expected a policy with a budget, such as 'snapkv(budget=1024)', got {quote(self.kind)}"
        )

    def new_state(self, reserve: int) -> State:
        """Return the state of a layer before the first token, with space for `reserve` tokens."""
        raise NotImplementedError


BUDGET = 1024
"""The number of keys that a policy keeps if neither a number nor a share is named."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DroppingPolicy(CachePolicy):
    """Base of the policies by which each layer and key head keeps `budget` keys.

    Without `budget` and `ratio` the budget is 1,024. `ratio`: instead of `budget`, the share of the prompt's
    keys that stay. `int8`: whether they are kept as integers, as with the policy `int8`.
    """

    budget: PositiveInt | None = None
    ratio: PositiveShare | None = None
    int8: bool = False

    drops_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.budget is None and self.ratio is None:
            object.__setattr__(self, "budget", BUDGET)
        elif self.budget is not None and self.ratio is not None:
            raise InputError(
                f"budget and ratio: expected one of them, got budget={self.budget} and ratio={self.ratio}; "
                "set budget to the number of keys that each head keeps, or ratio to the share of the "
                "prompt's keys"
            )
        if self.budget is not None and self.budget < self.least:
            raise InputError(
                f"budget: expected more keys than the {self.least - 1} that {quote(self.kind)} always keeps, "
                f"got {self.budget}; raise the budget"
            )

    @property
    def least(self) -> int:
        """The smallest budget: a key more than those that are never dropped."""
        first, last = self.always(1)
        return 1 + first + int(last)

    @property
    def keys(self) -> int:
        """The budget, once it is known (`for_prompt`)."""
        assert self.budget is not None
        return self.budget

    def budget_for(self, length: int) -> int:
        """Return the number of keys that stay of a prompt of `length` tokens."""
        if self.ratio is None:
            return self.keys
        return max(self.least, round(self.ratio * length))

    def for_prompt(self, length: int) -> Self:
        """Return the policy with the budget of a prompt of `length` tokens."""
        return dataclasses.replace(self, budget=self.budget_for(length), ratio=None)

    def changed_by(self, share: float) -> Self:
        """Return the policy with `share` more keys, or fewer, besides `least`."""
        if self.budget is None:
            assert self.ratio is not None
            return dataclasses.replace(self, ratio=self.ratio * (1 + share))
        # Cut towards 0: changes of opposite signs add up to nothing.
        return dataclasses.replace(self, budget=self.budget + int((self.budget - self.least) * share))

    def new_state(self, reserve: int) -> "CompressedCache":
        kind = CompressedCache if self.ratio is None else UnreadCache
        return kind(self, self.new_cache(reserve))

    def new_cache(self, reserve: int) -> PairCache:
        """Return the cache of keys and values before the first token."""
        return Int8Cache.empty(reserve) if self.int8 else KeyValueCache(reserve=reserve)

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the scores [B, Hkv, Tk] of all keys; higher scores are kept first.

        past: the scores of the keys before the call, with `after_every_call`; None in the first call.
        """
        raise NotImplementedError

    def always(self, budget: Count) -> tuple[int, Count]:
        """Return the numbers of first tokens of a text and of last tokens that are never dropped.

        budget: of all rows, or [B, 1].
        """
        return 0, 0

    def with_always(self, scores: Tensor, valid: Tensor | None, always: tuple[int, Count]) -> Tensor:
        """Return scores [B, Hkv, Tk] that are infinite for `always`, and -infinite for padding.

        valid: [B, Tk], False for padding.
        """
        first, last = always
        length = scores.shape[-1]
        slots = torch.arange(length, device=scores.device)
        place = slots.unsqueeze(0) if valid is None else valid.cumsum(-1) - 1
        latest = slots >= length - last if valid is None else among_last(valid, last)
        scores = scores.masked_fill(((place < first) | latest).unsqueeze(1), torch.inf)
        return scores if valid is None else scores.masked_fill(~valid.unsqueeze(1), -torch.inf)

    def kept(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """Return the keys that each head keeps, in order: indices [B, Hkv, budget], padding first.

        scores: [B, Hkv, Tk]. valid: [B, Tk], False for padding, which is dropped before any other key.
        """
        order = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        if valid is not None:
            order = order + scores.shape[-1] * valid.unsqueeze(1)
        # Stable, as neighbours pooled by their maximum are equal: the earlier key is kept.
        scores = self.with_always(scores, valid, self.always(self.keys))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.keys]
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
            real = self._real(valid[:, : self.seen].sum(-1, keepdim=True))
            valid = torch.cat([torch.arange(kept, device=device) >= kept - real, valid[:, self.seen :]], 1)
        if q_pos is None:
            q_pos = torch.arange(context.offset, context.kv_len, device=device)
        length = context.kv_len - self.dropped
        return Context(context.q_len, length, causal=context.causal, q_pos=q_pos, kv_valid=valid)

    def _real(self, tokens: Tensor) -> Tensor:
        """Return how many of the kept keys are no padding, at most; tokens: of each row, [B, 1]."""
        return tokens

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
        y, cache = mechanism(q, k, v, context, self.cache, self._terms(kept_terms))
        assert isinstance(cache, PairCache)
        turn = lambda x, context: position.rotate(x, x, context, site)[0]  # noqa: E731
        mod = None if distances is None else distances.score_mod(q, k, context)
        return y, self.after(CacheCall(q, unrotated, cache, context, scale, turn, mod))

    def _terms(self, terms: ScoreTerms) -> ScoreTerms:
        """Return the terms of scores with these kept keys."""
        return terms

    def after(self, call: CacheCall) -> "CompressedCache":
        """Return the state after a call."""
        policy, cache, held = self.policy, call.cache, call.cache.held
        if not policy.after_every_call and (self.seen or held <= policy.keys):
            return dataclasses.replace(self, cache=cache, seen=self.seen or held)
        check_tables(policy, call.context)
        seen, scores = self.dropped + held, policy.scores(call, self.scores)
        if held <= policy.keys:
            return dataclasses.replace(self, cache=cache, scores=scores, seen=seen)
        valid = call.context.kv_valid
        index = self._kept(scores, None if valid is None else valid.bool())
        slots = dataclasses.replace(self, cache=cache).slots
        return dataclasses.replace(
            self,
            cache=cache.gathered(index),
            kept=index if slots is None else slots.gather(-1, index),
            scores=scores.gather(-1, index) if policy.after_every_call else None,
            seen=seen,
        )

    def _kept(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """Return the keys that the heads keep by their scores [B, Hkv, Tk], [B, Hkv, K]."""
        return self.policy.kept(scores, valid)

    def reorder_(self, index: Tensor) -> "CompressedCache":
        """Return the batch rows `index`; the cache may write to its spare buffers."""
        return self._each(lambda tensor: tensor.index_select(0, index), lambda state: state.reorder_(index))

    def truncated_(self, count: int) -> "CompressedCache | None":
        """Remove the last `count` tokens; None if keys were dropped for them."""
        return None if self.policy.after_every_call else super().truncated_(count)


@dataclasses.dataclass(frozen=True)
class UnreadCache(CompressedCache):
    """The cache of a policy with `ratio` before the prompt: its lengths decide the budgets."""

    def after(self, call: CacheCall) -> CompressedCache:
        """Return the state after the prompt, with its budget."""
        lengths = prompt_lengths(call)
        policy = self.policy.for_prompt(max(lengths))
        budgets = [self.policy.budget_for(length) for length in lengths]
        if len(set(budgets)) == 1:
            return CompressedCache(policy, self.cache).after(call)
        return RowsCache(
            policy, self.cache, budgets=call.queries.new_tensor(budgets, dtype=torch.long)
        ).after(call)


@dataclasses.dataclass(frozen=True)
class RowsCache(CompressedCache):
    """The cache of a padded batch, in which a shorter row keeps fewer keys, and padding in their place.

    budgets: [B], of the rows; the policy has the largest.
    """

    budgets: Tensor | None = None

    def _kept(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        assert self.budgets is not None
        assert valid is not None
        budgets, length = self.budgets.unsqueeze(1), scores.shape[-1]
        scores = self.policy.with_always(scores, valid, self.policy.always(budgets))
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        chosen = (rank < budgets.unsqueeze(1)) & valid.unsqueeze(1)
        # A row has more padding than the keys it lacks: other rows, which are longer, have as many more keys.
        order = chosen.long() * 2 - (valid.unsqueeze(1) & ~chosen).long()
        best = order.sort(dim=-1, descending=True, stable=True).indices[..., : self.policy.keys]
        return best.gather(-1, (best + length * chosen.gather(-1, best)).argsort(-1))

    def _real(self, tokens: Tensor) -> Tensor:
        assert self.budgets is not None
        return tokens.minimum(self.budgets.unsqueeze(1))


def prompt_lengths(call: CacheCall) -> list[int]:
    """Return the number of tokens of each row of a first call that are no padding."""
    context, rows = call.context, len(call.queries)
    valid = context.kv_valid
    if valid is None:
        return [context.kv_len] * rows
    # The layers share the answer: reading it waits for a GPU.
    return context.once("prompt lengths", lambda: valid.bool().sum(-1).expand(rows).tolist())


def check_tables(policy: DroppingPolicy, context: Context) -> None:
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
