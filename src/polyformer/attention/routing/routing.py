"""Routing Transformer: a token attends to the tokens of its own cluster, found by k-means over content.

    y_i = softmax_j(n(q_i) . n(k_j) / sqrt(D)) v_j    over the `window` nearest j with c(k_j) = c(q_i)

n is LayerNorm without scale and bias, c(x) the nearest of a head's centroids (core/centroids). A causal query
sees the last `window` keys of its cluster at or before itself; without causality also the next `window` after
it. Some heads, half by default, are local: softmax attention over the last `local_window` tokens (and as many
after). With sqrt(n) clusters and a window of sqrt(n) the cost is n^1.5 D. Roy et al. 2021, section 4.

Deviations: the paper gives each centroid the `window` tokens of the whole sequence that are nearest to it, so
that which earlier tokens a query sees hangs on later ones; here it does not. Where keys are the queries
(`share_queries`), a token sees itself only if it sees nothing else, as in the Reformer; where they are not, a
query may see nothing, which gives zeros. Padding belongs to no cluster. Centroids begin as random
directions, move by the mean direction of a cluster, whatever the batch's size, and are not moved by a token's
gradient.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.attention.routing.centroids import Centroids, normed
from polyformer.attention.routing.interval_attention import interval_attention
from polyformer.attention.routing.intervals import cluster_intervals
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.state import State
from polyformer.dot_product.isolation import guarded
from polyformer.ops.softmax import record, recorded, recording, softmax
from polyformer.patterns.implied import implied
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig(MechanismConfig):
    """Windows count keys: `window` those of the own cluster, `local_window` those just before and the own."""

    clusters: int = 16  # of each routed head; the root of the length costs least
    window: int = 256
    local_heads: int | None = None  # the first heads; by default half of all, rounded down
    local_window: int = 256
    decay: float = 0.999  # of the moving average of the centroids, a training step
    share_queries: bool = False  # the keys are the queries
    plain: bool = False  # all pairs at once: the definition

    kind: ClassVar[str] = "routing"
    paper: ClassVar[str] = "Roy et al. 2021, section 4"
    relates: ClassVar[bool] = False
    eager: ClassVar[str] = "the sizes of its parts hang on how many tokens chose each cluster"

    def __post_init__(self) -> None:
        for name, least in (("clusters", 1), ("window", 1), ("local_window", 2)):
            if getattr(self, name) < least:
                raise InputError(f"{name}: expected {least} or more, got {getattr(self, name)}")
        if self.local_heads is not None and self.local_heads < 0:
            raise InputError(f"local_heads: expected 0 or more, got {self.local_heads}")
        if not 0 <= self.decay < 1:
            raise InputError(f"decay: expected a number in [0, 1), got {self.decay}; 0.999 is the paper's")
        object.__setattr__(self, "shares_queries", self.share_queries)

    def near(self, num_heads: int) -> int:
        """How many of `num_heads` are local."""
        near = num_heads // 2 if self.local_heads is None else self.local_heads
        if near >= num_heads:
            raise InputError(
                f"local_heads: expected fewer than the {num_heads} heads, so that one is routed, got {near}; "
                "for local heads alone use 'softmax' with a Window"
            )
        return near

    def build(self, num_heads: int, head_size: int) -> "Routing":
        return (PlainRouting if self.plain else Routing)(self, num_heads, head_size)

    def definition(self) -> "RoutingConfig":
        return dataclasses.replace(self, plain=True)

    @classmethod
    def examples(cls) -> tuple["RoutingConfig", ...]:
        # Of sizes at which no token of the contract tests lies between two clusters, where rounding decides.
        return (
            cls(clusters=2, window=3, local_window=3),
            cls(clusters=3, window=3, local_window=3, decay=0.5),
            cls(clusters=3, window=8, local_heads=0, share_queries=True),
        )


@dataclasses.dataclass(frozen=True)
class RoutingState(State):
    """Caches: the local heads' own; normed keys and values of the routed; their clusters, as keys."""

    local: State | None
    routed: KeyValueCache
    clusters: KeyValueCache


@dataclasses.dataclass(frozen=True, eq=False)
class Routed:
    """Normed q [B, H, Tq, D] and k [B, H, Tk, D]; v [B, H, Tk, Dv]; the clusters of both."""

    q: Tensor
    k: Tensor
    v: Tensor
    of_queries: Tensor
    of_keys: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5


class Routing(Mechanism):
    """The first heads are local, the others routed."""

    def __init__(self, config: RoutingConfig, num_heads: int, head_size: int):
        super().__init__()
        self.config, self.near = config, config.near(num_heads)
        window = {"kind": "softmax", "pattern": f"Window({config.local_window - 1})"}
        local = MechanismConfig.from_dict(window)
        local = local.definition() if config.plain else local
        self.local = local.build(self.near, head_size) if self.near else None
        self.centroids = Centroids(num_heads - self.near, config.clusters, head_size, config.decay)

    def new_state(self, reserve: int) -> RoutingState:
        local = None if self.local is None else self.local.new_state(reserve)
        return RoutingState(local, KeyValueCache(reserve=reserve), KeyValueCache(reserve=reserve))

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
        assert isinstance(state, RoutingState | None)
        if self.training and state is None and self.config.clusters > q.shape[2]:
            raise InputError(
                f"clusters: expected at most one for each token, got {self.config.clusters} and rows of "
                f"{q.shape[2]} tokens to learn from; give longer rows or fewer clusters"
            )
        groups, near = q.shape[1] // k.shape[1], self.near
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        parts, weights, local = [], [], None
        if self.local is not None:
            with _watched(weights):
                y, local = self.local(
                    q[:, :near],
                    k[:, :near],
                    v[:, :near],
                    context,
                    None if state is None else state.local,
                    None,
                )
            parts.append(y)
        with _watched(weights), torch.autocast(q.device.type, enabled=False):
            y, state = self._route(q[:, near:], k[:, near:], v[:, near:], context, state)
        parts.append(y.to(q.dtype))
        if weights:
            record(torch.cat(weights, 1))
        state = None if state is None else dataclasses.replace(state, local=local)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1), state

    def _route(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: RoutingState | None
    ) -> tuple[Tensor, RoutingState | None]:
        exact = torch.promote_types(q.dtype, torch.float32)
        q, k = normed(q.to(exact)), normed(k.to(exact))
        of_queries, of_keys = self.centroids(q), self.centroids(k)
        new = slice(context.kv_len - k.shape[2], context.kv_len)
        self.centroids.learn(
            (q, of_queries, _valid(context, _slots(context))), (k, of_keys, _valid(context, new))
        )
        if state is not None:
            k, v, routed = state.routed.append(k, v)
            of_keys = of_keys.unsqueeze(-1)
            of_keys, _, clusters = state.clusters.append(of_keys, of_keys[..., :0])
            of_keys, state = of_keys.squeeze(-1), RoutingState(None, routed, clusters)
        return self._mix(Routed(q, k, v.to(exact), of_queries, of_keys), context), state

    def _mix(self, given: Routed, context: Context) -> Tensor:
        config = self.config
        if recording():
            return plainly(given, context, config)
        if context.causal and given.q.shape[2] == 1:
            return last_alone(given, context, config)
        intervals = cluster_intervals(
            given.of_queries, given.of_keys, config.clusters, config.window, context, config.share_queries
        )
        return interval_attention(given.q, given.k, given.v, intervals, given.scale)


class PlainRouting(Routing):
    """By the equation."""

    def _mix(self, given: Routed, context: Context) -> Tensor:
        return plainly(given, context, self.config)


def plainly(given: Routed, context: Context, config: RoutingConfig) -> Tensor:
    """All pairs, those that are not seen left out."""
    weights, _ = softmax(
        given.q @ given.k.mT * given.scale, seen(given.of_queries, given.of_keys, context, config)
    )
    return weights @ given.v


def seen(of_queries: Tensor, of_keys: Tensor, context: Context, config: RoutingConfig) -> Tensor:
    """Who sees whom, [B, H, Tq, Tk], of clusters [B, H, Tq] and [B, H, Tk]."""
    same = together(of_queries, of_keys, context)
    q_slot, slot = _places(context, same.device)
    number = same.cumsum(-1)  # the first key of the cluster has 1
    reached = (same & (slot <= q_slot)).sum(-1, keepdim=True)
    last = reached if context.causal else reached + config.window
    found = same & (number > reached - config.window) & (number <= last)
    if config.share_queries:
        found = found & ~((slot == q_slot) & (found.sum(-1, keepdim=True) > 1))
    return found


def together(of_queries: Tensor, of_keys: Tensor, context: Context) -> Tensor:
    """Which real tokens of one document are of one cluster, earlier or later, [B, H, Tq, Tk]."""
    same = of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2)
    limits = implied(dataclasses.replace(context, causal=False, memo={}))
    if limits is not None:
        q_slot, slot = _places(context, same.device)
        b = torch.arange(len(same), device=same.device).view(-1, 1, 1, 1)
        same = same & limits.allows(context, b, torch.zeros_like(b), q_slot - context.offset, slot)
    real = _valid(context, _slots(context))
    return same if real is None else same & real[:, None, :, None]


def last_alone(given: Routed, context: Context, config: RoutingConfig) -> Tensor:
    """A single causal query: only what it sees is read, beside the clusters."""
    found = together(given.of_queries, given.of_keys, context).squeeze(2)
    (own,), slot = _places(context, found.device)
    slots = torch.where(found & (slot <= own), slot, -1)
    slots = slots.topk(min(config.window, context.kv_len), dim=-1).values  # [B, H, W]
    if config.share_queries:
        others = (slots >= 0).sum(-1, keepdim=True) > 1
        slots = slots.masked_fill((slots == own) & others, -1)
    place = slots.clamp_min(0).unsqueeze(-1)
    k, v = (x.gather(2, place.expand(-1, -1, -1, x.shape[3])) for x in (given.k, given.v))
    weights, _ = softmax(given.q @ k.mT * given.scale, (slots >= 0).unsqueeze(2))
    return weights @ v


def _places(context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
    """The slots of the queries, [Tq, 1], and of the keys, [Tk]."""
    queries = torch.arange(context.q_len, device=device).unsqueeze(1) + context.offset
    return queries, torch.arange(context.kv_len, device=device)


def _slots(context: Context) -> slice:
    """The slots of the queries."""
    return slice(context.offset, context.offset + context.q_len)


def _valid(context: Context, slots: slice) -> Tensor | None:
    return None if context.kv_valid is None else context.kv_valid[:, slots].bool()


@contextlib.contextmanager
def _watched(weights: list[Tensor]) -> Iterator[None]:
    """While somebody looks at weights, those computed inside go to this list instead."""
    if not recording():
        yield
        return
    with recorded() as records:
        yield
    weights += records
