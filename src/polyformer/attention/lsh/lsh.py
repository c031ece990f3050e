"""LSH attention: a token looks among the tokens that a random hash puts into its bucket.

    h(x) = argmax [x R; -x R]        k_j = q_j / |q_j|
    y_i = sum_j p_ij v_j             p_ij = softmax over the j that i sees of q_i . k_j / sqrt(D)

Keys are queries of unit length, so that tokens which point the same way share a bucket. There are several
rounds of hashing, and i sees j if it does so in any round: if j is one of the last `window` tokens of i's own
bucket at or before i. Without causality it is also one of the next `window` - 1. The window counts the token
itself, which sees itself only where it sees nothing else. A key seen in several rounds counts once; joining
rounds by their log-sum-exp with log c taken off says the same (equations 4 and 5 of the paper).

With `whole` the first tokens of a text, up to so many, also see one another, and `unscaled` scores are not
divided by sqrt(D), as in transformers' Reformer, whose keys are q_j / sqrt(|q_j|^2 + key_eps D).

Deviations: the paper cuts the sorted tokens into chunks, whose edges later tokens move; a window sees no
future. The bucket of a token is that of its key. The heads of a layer share R [D, rounds * buckets / 2],
which is drawn once. Cost: products of R T `window` pairs of tokens, and T D `rounds` * `buckets` / 2 for the
hashes; a step of decoding compares T `rounds` bucket numbers. Kitaev et al. 2020 (Reformer), section 2.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.attention.lsh.sorted_attention import sorted_attention
from polyformer.attention.lsh.sorted_window import bucket_windows
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.state import State
from polyformer.dot_product.guard import guarded
from polyformer.ops.linear import linear
from polyformer.ops.precision import at_least_float32, without_autocast
from polyformer.ops.random_directions import RandomDirections
from polyformer.ops.softmax import recording, softmax
from polyformer.sequence.context import Context

FEW = 64
"""Queries are looked up one by one where there are so many times more keys."""

HASHED = 1 << 22
"""Projections that are computed together for hashes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSHConfig(MechanismConfig):
    """`buckets` of a round; `window`: the tokens of its own bucket that a token sees, itself among them."""

    rounds: int = 4
    buckets: int = 64
    window: int = 64
    plain: bool = False  # all pairs at once: the definition
    whole: int = 0  # tokens at the start of a text that see one another
    unscaled: bool = False  # scores are not divided by sqrt(D)
    key_eps: float = 0.0  # keeps keys of no length finite

    kind: ClassVar[str] = "lsh"
    paper: ClassVar[str] = "Kitaev et al. 2020, section 2"
    relates: ClassVar[bool] = False
    shares_queries: ClassVar[bool] = True
    eager: ClassVar[str] = "tokens are sorted by what they hash to, and runs of them walked in Python"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InputError(f"rounds: expected 1 round of hashing or more, got {self.rounds}")
        if self.buckets < 2 or self.buckets % 2:
            near = max(2, self.buckets + self.buckets % 2)
            raise InputError(
                f"buckets: one for a direction and one for its opposite, expected an even number from 2 on, "
                f"got {self.buckets}; give {near}"
            )
        if self.window < 1:
            raise InputError(f"window: counts the token itself, expected 1 or more, got {self.window}")
        if not 0 <= self.whole <= self.window:
            raise InputError(f"whole: expected 0 to window {self.window} tokens, got {self.whole}")
        if self.key_eps < 0:
            raise InputError(f"key_eps: expected 0 or more, got {self.key_eps}")

    def unit(self, k: Tensor) -> Tensor:
        """Keys of unit length."""
        k = at_least_float32(k)
        if not self.key_eps:
            return F.normalize(k, dim=-1)
        return k * (k.square().sum(-1, keepdim=True) + self.key_eps * k.shape[-1]).rsqrt()

    def scale(self, head_size: int) -> float:
        """What scores are multiplied by."""
        return 1.0 if self.unscaled else head_size**-0.5

    def build(self, num_heads: int, head_size: int) -> "LSHAttention":
        return (PlainLSH if self.plain else LSHAttention)(self, head_size)

    def definition(self) -> "LSHConfig":
        return dataclasses.replace(self, plain=True)

    @classmethod
    def examples(cls) -> tuple["LSHConfig", ...]:
        whole = cls(rounds=1, buckets=4, window=7, whole=5, unscaled=True, key_eps=1e-6)
        return cls(rounds=2, buckets=2, window=3), cls(rounds=3, buckets=4, window=40), whole


@dataclasses.dataclass(frozen=True)
class Hashed(State):
    """Keys and values, and in `buckets` the keys' bucket numbers [B, H, T, R] beside values of no width."""

    cache: KeyValueCache
    buckets: KeyValueCache

    def append(self, k: Tensor, v: Tensor, buckets: Tensor) -> tuple[Tensor, Tensor, Tensor, "Hashed"]:
        k, v, cache = self.cache.append(k, v)
        rows = buckets.transpose(2, 3)
        rows, _, kept = self.buckets.append(rows, rows[..., :0])
        return k, v, rows.transpose(2, 3), Hashed(cache, kept)


class LSHAttention(Mechanism):
    """Its state is what it has seen, hashed."""

    def __init__(self, config: LSHConfig, head_size: int):
        super().__init__()
        self.config = config
        self.directions = RandomDirections(config.rounds * config.buckets // 2, head_size, orthogonal=False)

    def new_state(self, reserve: int) -> State:
        return Hashed(KeyValueCache(reserve=reserve), KeyValueCache(reserve=reserve))

    @guarded
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: ScoreTerms | None,
    ) -> tuple[Tensor, State | None]:
        with without_autocast(q):
            buckets = self._with_first(self.hash(k), context)
            if state is not None:
                assert isinstance(state, Hashed)
                k, v, buckets, state = state.append(k, v, buckets)
            y = self._mix(at_least_float32(q), k, v, buckets, context)
        return y.to(q.dtype), state

    @torch.no_grad()
    def hash(self, k: Tensor) -> Tensor:
        """The buckets [B, H, R, T] of keys [B, H, T, D]."""
        turn, half = self.directions(at_least_float32(k)), self.config.buckets // 2
        iota = torch.arange(half, dtype=turn.dtype, device=turn.device)
        found = []
        for rows in at_least_float32(k).flatten(0, 2).split(max(1, HASHED // len(turn))):
            x = linear(rows, turn).unflatten(-1, (self.config.rounds, half))
            top, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
            # Where the extreme stands; argmax itself is no vector operation on a CPU and far slower.
            where = x.eq_(torch.where(top < -low, low, top)).mul_(iota).amax(-1)
            found.append((where + half * (top < -low).squeeze(-1)).int())
        return torch.cat(found).view(*k.shape[:3], -1).transpose(2, 3)

    def _with_first(self, buckets: Tensor, context: Context) -> Tensor:
        """One more round, in which the first tokens of a text share a bucket."""
        if not self.config.whole:
            return buckets
        b, index = (torch.arange(n, device=buckets.device) for n in (len(buckets), buckets.shape[-1]))
        index = index + context.kv_len - len(index)  # after the past
        first = context.key_position(b.unsqueeze(1), index) < self.config.whole
        first = first.expand(len(buckets), -1)[:, None, None]
        return torch.cat([buckets, buckets[:, :, :1].add(1).masked_fill(first, 0)], 2)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, context: Context) -> Tensor:
        if recording():
            return _plainly(self.config, q, k, v, buckets, context)
        first, rest = context.offset, context.kv_len - context.offset - context.q_len
        if context.causal and context.q_len * FEW <= context.kv_len:
            return _one_by_one(self.config, q, k, v, buckets, context)
        windows = bucket_windows(buckets, self.config.window, context)
        q = F.pad(q, (0, 0, first, rest))  # the past asks nothing
        scale = self.config.scale(q.shape[3])
        y = sorted_attention(
            q, self.config.unit(k), at_least_float32(v), windows, context, scale, itself=False
        )
        return y[:, :, first : first + context.q_len]


class PlainLSH(LSHAttention):
    """By the equation, over all pairs."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, context: Context) -> Tensor:
        return _plainly(self.config, q, k, v, buckets, context)


def _meets(buckets: Tensor, context: Context) -> Tensor:
    """Whether a query and a key are of one bucket and document, and no padding: [B, H, Tq, R, Tk]."""
    slots = slice(context.offset, context.offset + context.q_len)
    same = buckets[..., slots].transpose(2, 3).unsqueeze(-1) == buckets.unsqueeze(2)
    if context.q_doc is not None and context.kv_doc is not None:
        same &= (context.q_doc.unsqueeze(-1) == context.kv_doc.unsqueeze(-2))[:, None, :, None]
    if context.kv_valid is not None:
        valid = context.kv_valid
        same &= (valid[:, slots].unsqueeze(-1) & valid.unsqueeze(-2))[:, None, :, None]
    return same


def _plainly(config: LSHConfig, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, context: Context) -> Tensor:
    """The definition: [B, H, Tq, Dv]."""
    query = torch.arange(context.q_len, device=q.device).view(-1, 1, 1) + context.offset
    key = torch.arange(context.kv_len, device=q.device)
    same = _meets(buckets, context)
    before, after = same & (key <= query), same & (key > query)
    seen = before & (before.flip(-1).cumsum(-1).flip(-1) <= config.window)
    if not context.causal:
        seen |= after & (after.cumsum(-1) < config.window)
    seen, itself = seen.any(3), (key == query).squeeze(1)
    others = seen & ~itself
    allowed = others | (seen & ~others.any(-1, keepdim=True))
    scores = q @ config.unit(k).mT * config.scale(q.shape[3])
    return softmax(scores, allowed)[0] @ at_least_float32(v)


def _one_by_one(
    config: LSHConfig, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, context: Context
) -> Tensor:
    """The same for a few queries and their past: no key is read that is not seen. [B, H, Tq, Dv]."""
    slots = torch.arange(context.q_len, device=q.device) + context.offset
    same = _meets(buckets, context)
    if context.q_len > 1:
        same &= torch.arange(context.kv_len, device=q.device) <= slots.view(-1, 1, 1)
    rows, keys = same.flatten(0, 3).nonzero(as_tuple=True)
    ends = torch.bincount(rows, minlength=same[..., 0].numel()).cumsum(0)
    last = ends[rows] - torch.arange(len(rows), device=q.device) <= config.window
    rows, keys = rows[last] // buckets.shape[2], keys[last]
    number = torch.arange(q[..., 0].numel(), device=q.device)
    slots = slots.repeat(len(number) // context.q_len)
    seen = torch.zeros(len(number), context.kv_len, dtype=torch.bool, device=q.device)
    seen[rows, keys] = True
    own = seen[number, slots]
    seen[number, slots] = False
    seen[number, slots] = own & ~seen.any(1)
    rows, keys = seen.nonzero(as_tuple=True)
    heads = rows // context.q_len
    k, v = (at_least_float32(x.flatten(0, 1)[heads, keys]) for x in (k, v))
    scores = (q.flatten(0, 2)[rows] * config.unit(k)).sum(-1) * config.scale(q.shape[3])
    top = scores.new_zeros(len(number)).scatter_reduce(0, rows, scores.detach(), "amax", include_self=False)
    weights = (scores - top[rows]).exp()
    total = scores.new_zeros(len(number)).index_add(0, rows, weights)
    y = v.new_zeros(len(number), v.shape[1]).index_add(0, rows, (weights / total[rows]).unsqueeze(-1) * v)
    return y.view(*q.shape[:3], -1)
