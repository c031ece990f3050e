"""LSH attention: a token attends to tokens that a random hash assigns to the same bucket.

    h(x) = argmax [x R; -x R]        k_j = q_j / |q_j|
    S_i = union over the rounds r of the last m slots j <= i with h_r(k_j) = h_r(k_i)
    y_i = sum_j p_ij v_j             p_ij = softmax over S_i of q_i . k_j / sqrt(D)

Keys are queries of unit length, so that tokens of the same direction share a bucket. There are several rounds
of hashing; S_i, the keys that i attends to, has the last m = `window` tokens of i's bucket at or before i.
Without causality it also has the next m - 1. The window counts the token itself, which attends to itself only
if there is no other key. A key of several rounds counts once; the paper combines the rounds by their
log-sum-exp and subtracts log c from a key of c rounds, which gives the same result (its equations 4 and 5).

With `whole`, up to that number of the first tokens of a text also attend to one another, and with `unscaled`
scores are not divided by sqrt(D). Both are in transformers' Reformer, which has keys
q_j / sqrt(|q_j|^2 + key_eps D).

Deviations: the paper cuts the sorted tokens into chunks, which makes their edges depend on later tokens; a
window does not. The bucket of a token is the bucket of its key. The heads of a layer share R
[D, rounds * buckets / 2], which is drawn once. Cost: products of R T `window` pairs of tokens, and T D
`rounds` * `buckets` / 2 for the hashes: linear in T. A step of decoding compares T `rounds` bucket numbers.
Kitaev et al. 2020 (Reformer), section 2.

Which form runs:

    definition     all pairs: for recorded weights, the backend "definition", and as the reference of tests
    _look_up       the definition over only the keys of a query's window: causal, few queries after many keys
    sorted         everything else, in time linear in T (`sorted_attention`; with a position scheme its tiles
                   are computed under autograd)

None replaces another: on one core, the definition takes 2 to 6 times as long as the lookup for one query
after 8,192 keys, and sorting 65 times; sorted tiles under autograd take 2.6 times as long as
`sorted_attention` in training at 4,096 tokens (2026-11-30, float32, two rounds, windows of 64).
"""

import dataclasses
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import (
    Heads,
    Mechanism,
    MechanismBackend,
    MechanismConfig,
    PositionTerms,
)
from polyformer.attention.mechanisms.lsh.sorted_attention import sorted_attention, sorted_attention_with_terms
from polyformer.attention.mechanisms.lsh.sorted_window import bucket_windows
from polyformer.attention.mechanisms.pair_terms import Pairs, PairTerms, add_terms, weighted_values
from polyformer.attention.mechanisms.random_directions import RandomDirections
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import record_mark
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.linear import linear
from polyformer.core.ops.softmax import recording, shares, softmax
from polyformer.core.ranges import NonNegativeFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates


def definition(
    heads: Heads,
    buckets: Tensor,
    context: Context,
    window: int,
    scale: float,
    terms: PairTerms | None,
) -> Tensor:
    """Return the attention output [B, H, Tq, Dv].

    Args:
        heads: as many for keys as for queries; the keys have unit length.
        buckets: the buckets h of the keys, [B, H, R, Tk].
        context: describes the queries and keys.
        window: m, the number of keys of its bucket that a query attends to.
        scale: the factor of the scores.
        terms: the terms of a position scheme, None for none.
    """
    q, k, v = heads
    scores = add_terms(q @ k.mT * scale, q, k, terms)
    weights, _ = softmax(scores, attention_mask(buckets, context, window))
    return weighted_values(weights, v, terms)


def attention_mask(buckets: Tensor, context: Context, window: int) -> Tensor:
    """Return whether each key is in S_i of the query, [B, H, Tq, Tk]."""
    query = torch.arange(context.q_len, device=buckets.device).view(-1, 1, 1) + context.offset
    key = torch.arange(context.kv_len, device=buckets.device)
    same = same_bucket(buckets, context)
    before, after = same & (key <= query), same & (key > query)
    # The reversed cumulative sum counts a bucket's keys from each key up to the query.
    seen = before & (before.flip(-1).cumsum(-1).flip(-1) <= window)
    if not context.causal:
        seen |= after & (after.cumsum(-1) < window)
    seen, itself = seen.any(3), (key == query).squeeze(1)
    # A token attends to itself only if it sees no other key.
    others = seen & ~itself
    return others | (seen & ~others.any(-1, keepdim=True))


def same_bucket(buckets: Tensor, context: Context) -> Tensor:
    """Return whether query and key share a bucket and document and are not padding, [B, H, Tq, R, Tk]."""
    slots = slice(context.offset, context.offset + context.q_len)
    same = buckets[..., slots].transpose(2, 3).unsqueeze(-1) == buckets.unsqueeze(2)
    if context.q_doc is not None and context.kv_doc is not None:
        same &= (context.q_doc.unsqueeze(-1) == context.kv_doc.unsqueeze(-2))[:, None, :, None]
    if context.kv_valid is not None:
        valid = context.kv_valid
        same &= (valid[:, slots].unsqueeze(-1) & valid.unsqueeze(-2))[:, None, :, None]
    return same


MAX_LOOKUP_QUERIES, MIN_KEY_RATIO = 64, 64
"""The maximum number of queries for lookup, and the minimum ratio of keys to queries.

A lookup compares every query with every key, sorting moves every key some tens of times: 85 to 90 queries
take the same time both ways at 2048 and at 8192 keys, under AVX2 as under AVX-512.
"""


def window_keys(buckets: Tensor, context: Context, window: int) -> Tensor:
    """Return the slots of the keys that each of the N = B H Tq causal queries attends to, [N, L].

    buckets: [B, H, R, Tk]. L is the largest number of keys of a query; the others' rows end with -1.
    """
    device = buckets.device
    slots = torch.arange(context.q_len, device=device) + context.offset
    same = same_bucket(buckets, context)
    if context.q_len > 1:
        same &= torch.arange(context.kv_len, device=device) <= slots.view(-1, 1, 1)
    rows, keys = same.flatten(0, 3).nonzero(as_tuple=True)
    number = torch.arange(same[..., 0, 0].numel(), device=device)
    ends = torch.bincount(rows, minlength=len(number) * buckets.shape[2]).cumsum(0)
    # Pairs are sorted by query and round: the distance to the end of its group numbers a key from the last.
    last = ends[rows] - torch.arange(len(rows), device=device) <= window
    rows, keys = rows[last] // buckets.shape[2], keys[last]  # merge the rounds of each query
    slots = slots.repeat(len(number) // context.q_len)
    # A mask instead of a list of pairs, so that a key of several rounds counts once.
    seen = torch.zeros(len(number), context.kv_len, dtype=torch.bool, device=device)
    seen[rows, keys] = True
    # A query attends to its own key only if it sees no other key.
    own = seen[number, slots]
    seen[number, slots] = False
    seen[number, slots] = own & ~seen.any(1)
    rows, keys = seen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(number))
    first = counts.cumsum(0) - counts  # where the keys of a query begin in the list
    listed = keys.new_full((len(number), int(counts.max())), -1)
    listed[rows, torch.arange(len(rows), device=device) - first[rows]] = keys
    return listed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSHConfig(MechanismConfig):
    """LSH attention: tokens attend to tokens that random hashes put into the same bucket.

    `buckets`: the number of buckets per round; `window`: the number of tokens of the same bucket that a token
    attends to, including itself.
    """

    rounds: PositiveInt = 4
    buckets: int = 64
    window: PositiveInt = 64
    backend: MechanismBackend = "auto"  # "definition": all pairs at once
    whole: int = 0  # tokens at the start of a text that attend to one another
    unscaled: bool = False  # scores are not divided by sqrt(D)
    key_eps: NonNegativeFloat = 0.0  # keeps keys of length 0 finite

    kind: ClassVar[str] = "lsh"
    paper: ClassVar[str] = "Kitaev et al. 2020, section 2"
    shares_queries: ClassVar[bool] = True
    eager: ClassVar[str] = "tokens are sorted by bucket, and a Python loop walks over runs of them"

    def __post_init__(self) -> None:
        if self.buckets < 2 or self.buckets % 2:
            near = max(2, self.buckets + self.buckets % 2)
            raise InputError(
                f"buckets: expected an even number of 2 or more (one per direction and one per opposite), "
                f"got {self.buckets}; use {near}"
            )
        if not 0 <= self.whole <= self.window:
            raise InputError(f"whole: expected 0 to window {self.window} tokens, got {self.whole}")

    def unit_keys(self, k: Tensor) -> Tensor:
        """Return keys of unit length."""
        k = at_least_float32(k)
        if not self.key_eps:
            return F.normalize(k, dim=-1)
        return k * (k.square().sum(-1, keepdim=True) + self.key_eps * k.shape[-1]).rsqrt()

    def scale(self, head_size: int) -> float:
        """Return the factor of the scores: 1 / sqrt(D), or 1 if `unscaled`."""
        return 1.0 if self.unscaled else head_size**-0.5

    def build(self, num_heads: int, head_size: int) -> "LSHAttention":
        """Return the module, which has no parameters: R is a buffer."""
        return LSHAttention(self, head_size)

    @classmethod
    def examples(cls) -> tuple["LSHConfig", ...]:
        """Return configs with narrow and wide windows, and with the options of transformers' Reformer."""
        whole = cls(rounds=1, buckets=4, window=7, whole=5, unscaled=True, key_eps=1e-6)
        return cls(rounds=2, buckets=2, window=3), cls(rounds=3, buckets=4, window=40), whole


@dataclasses.dataclass(frozen=True)
class HashedCache(StateOfStates):
    """A cache of keys and values, and a cache of the keys' buckets [B, H, T, R] with empty values."""

    cache: KeyValueCache
    buckets: KeyValueCache

    def append(self, k: Tensor, v: Tensor, buckets: Tensor) -> tuple[Tensor, Tensor, Tensor, "HashedCache"]:
        """Return all keys, values and buckets including the new ones, and the next state."""
        k, v, cache = self.cache.append(k, v)
        rows = buckets.transpose(2, 3)
        rows, _, kept = self.buckets.append(rows, rows[..., :0])
        return k, v, rows.transpose(2, 3), HashedCache(cache, kept)


class LSHAttention(Mechanism):
    """LSH attention by sorting, with a cache of keys, values and buckets as state."""

    def __init__(self, config: LSHConfig, head_size: int):
        super().__init__()
        self.config = config
        self.directions = RandomDirections(config.rounds * config.buckets // 2, head_size, orthogonal=False)

    def new_state(self, reserve: int) -> State:
        return HashedCache(KeyValueCache(reserve=reserve), KeyValueCache(reserve=reserve))

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Hash the new keys, append them to the state, and attend."""
        with without_autocast(q):
            buckets = self.hash(k)
            for number in range(self.config.rounds):
                record_mark(f"bucket, round {number + 1}", partial(torch.select, buckets, 2, number))
            buckets = self._append_first_round(buckets, context)
        if state is not None:
            assert isinstance(state, HashedCache)
            k, v, buckets, state = state.append(k, v, buckets)
        terms = PairTerms.of(position, q, k, context, self.config.scale(q.shape[3]))
        with without_autocast(q):
            y = self._attend(Heads(at_least_float32(q), k, v), buckets, context, terms)
        return y.to(q.dtype), state

    def hash(self, k: Tensor) -> Tensor:
        """Return the buckets [B, H, R, T] of keys [B, H, T, D]."""
        k = at_least_float32(k)
        return hash_keys(k, self.directions(k), self.config.rounds)

    def _append_first_round(self, buckets: Tensor, context: Context) -> Tensor:
        """Append a round in which the first tokens of a text share a bucket."""
        if not self.config.whole:
            return buckets
        b, index = (torch.arange(n, device=buckets.device) for n in (len(buckets), buckets.shape[-1]))
        index = index + context.kv_len - len(index)  # after the past
        first = context.key_position(b.unsqueeze(1), index) < self.config.whole
        first = first.expand(len(buckets), -1)[:, None, None]
        return torch.cat([buckets, buckets[:, :, :1].add(1).masked_fill(first, 0)], 2)

    def _attend(self, heads: Heads, buckets: Tensor, context: Context, terms: PairTerms | None) -> Tensor:
        q, window, scale = heads.q, self.config.window, self.config.scale(heads.q.shape[3])
        if recording() or self.config.backend == "definition":
            return definition(self._with_unit_keys(heads), buckets, context, window, scale, terms)
        # A few queries after many keys: comparing buckets is cheaper than sorting all keys.
        few = context.q_len <= min(MAX_LOOKUP_QUERIES, context.kv_len // MIN_KEY_RATIO)
        if context.causal and few:
            return self._look_up(heads, window_keys(buckets, context, window), terms)
        windows = bucket_windows(buckets, window, context)
        heads = self._with_unit_keys(heads)
        if terms is not None:
            return sorted_attention_with_terms(heads, windows, context, terms)
        first, rest = context.offset, context.kv_len - context.offset - context.q_len
        # The sorted form requires a query per key: keys of the past get queries of zeros.
        heads = heads._replace(q=F.pad(q, (0, 0, first, rest)))
        y = sorted_attention(heads, windows, context, scale)
        return y[:, :, first : first + context.q_len]

    def _look_up(self, heads: Heads, listed: Tensor, terms: PairTerms | None) -> Tensor:
        """Return the definition's output, computed for the keys in the slots `listed` [N, L] only."""
        q, k, v = heads
        query, slots = torch.arange(len(listed), device=q.device).unsqueeze(1), listed.clamp_min(0)
        head = query // q.shape[2]
        # [N, L, D]: a copy only of the keys that are read, whose buckets are compared without their vectors.
        keys, values = (at_least_float32(x.flatten(0, 1)[head, slots]) for x in (k, v))
        keys = self.config.unit_keys(keys)
        scores = q.flatten(0, 2).unsqueeze(1) @ keys.mT * self.config.scale(q.shape[3])  # [N, 1, L]
        hidden = (listed < 0).unsqueeze(1)
        if terms is None:
            weights, _ = shares(scores.masked_fill(hidden, -torch.inf))
            return (weights @ values).view(*q.shape[:3], -1)
        numbers = head // q.shape[1], head % q.shape[1], query % q.shape[2], slots
        b, h, i, slots = (x.unsqueeze(2) for x in numbers)
        pairs = Pairs(b, h, i, slots.mT)
        scores = terms.scores(scores, pairs, terms.content(q).flatten(0, 2).unsqueeze(1), keys)
        weights, _ = shares(scores.masked_fill(hidden, -torch.inf))
        more = terms.values(weights, pairs)
        return (weights @ values if more is None else weights @ values + more).view(*q.shape[:3], -1)

    def _with_unit_keys(self, heads: Heads) -> Heads:
        return Heads(heads.q, self.config.unit_keys(heads.k), at_least_float32(heads.v))


@torch.no_grad()
def hash_keys(k: Tensor, directions: Tensor, rounds: int) -> Tensor:
    """Return the buckets [B, H, rounds, T] of keys [B, H, T, D]; directions [rounds * buckets / 2, D].

    Keys are projected in runs that fit into the caches of all threads, or in the memory of an accelerator.
    """
    half = len(directions) // rounds
    iota = torch.arange(half, dtype=directions.dtype, device=directions.device)
    buckets = []
    threads = torch.get_num_threads() if k.device.type == "cpu" else 1
    for rows in k.flatten(0, 2).split(max(1, threads * cache_capacity(k) // len(directions))):
        x = linear(rows, directions).unflatten(-1, (rounds, half))
        top, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
        # The index of the extreme; argmax is not vectorized on a CPU and far slower.
        where = x.eq_(torch.where(top < -low, low, top)).mul_(iota).amax(-1)
        buckets.append((where + half * (top < -low).squeeze(-1)).int())
    return torch.cat(buckets).view(*k.shape[:3], -1).transpose(2, 3)
