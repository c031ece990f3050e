"""Routing Transformer: a token attends to the tokens of the same cluster, assigned by k-means over content.

    c(x) = argmax_c mu_c . n(x)
    mu_c <- normalize(decay mu_c + (1 - decay) normalize(sum of the n(x) with c(x) = c))
    y_i = softmax_j(n(q_i) . n(k_j) / sqrt(D)) v_j    over the `window` nearest j with c(k_j) = c(q_i)

n is LayerNorm without scale and bias, c(x) the nearest of a head's centroids mu. A causal query attends to
the last `window` keys of its cluster at or before itself; without causality also to the next `window` after
it. Some heads, half by default, are local: softmax attention over the last `local_window` tokens (without
causality also over the next). With sqrt(n) clusters and a window of sqrt(n) the cost is n^1.5 D. Roy et al.
2021, section 4.

Deviations: the paper gives each centroid the `window` tokens of the whole sequence that are nearest to it, so
that the earlier tokens that a query attends to depend on later ones; here they do not. If keys are the
queries (`share_queries`), a token attends to itself only if there is no other key, as in the Reformer;
otherwise a query may have no keys, which gives zeros. Padding is in no cluster. Centroids start as random
directions, move by the mean direction of a cluster, independent of the batch size, and get no gradients.

A training step uses the current centroids and updates them after its backward pass: the tokens of a pass do
not decide their own clusters, and recomputed activations are the same. Evaluation never changes them. Sums
are all-reduced over all processes. A centroid that no vector chose does not move.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from annotated_types import Ge, Interval
from torch import Tensor, nn

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import (
    DelegatedTerms,
    Mechanism,
    MechanismBackend,
    MechanismConfig,
    PositionTerms,
    ScoreTerms,
)
from polyformer.attention.mechanisms.pair_terms import PairTerms
from polyformer.attention.mechanisms.routing.interval_attention import (
    RoutedHeads,
    definition,
    interval_attention,
    interval_attention_with_terms,
)
from polyformer.attention.mechanisms.routing.interval_tiles import cluster_intervals, placeholder_clusters
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step, steps_of
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import record_mark
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.autograd import without_autocast
from polyformer.core.ops.softmax import record, recorded, recording
from polyformer.core.ranges import NonNegativeInt, PositiveInt, Wording
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates

LANES = 16
"""The number of centroids is padded to a multiple of this.

The widest vector registers in use have 16 numbers, and multiples of 16 also suit narrower registers. The
maximum of a row is computed four times as fast as its index, which is why `forward` computes the maximum
first and then the first entry that is equal.
"""

Chosen = tuple[Tensor, Tensor, Tensor | None]
"""Normed vectors [B, H, T, D], their clusters [B, H, T], and a mask of non-padding [B, T], None for all."""


def normed(x: Tensor) -> Tensor:
    """Return n(x): x [B, H, T, D] with mean 0 and length sqrt(D) over D."""
    # The memory layout of the projections, [B, T, H, D], which avoids copies.
    return F.layer_norm(x.transpose(1, 2), x.shape[-1:]).transpose(1, 2)


class Centroids(nn.Module):
    """mu [H, C, D]: random directions from a separate generator, seeded like the initial weights."""

    centres: Tensor

    def __init__(self, heads: int, count: int, width: int, decay: float):
        super().__init__()
        self.decay = decay
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randn(heads, count, width, generator=generator, dtype=torch.float64, device="cpu")
        centres = torch.empty(heads, count, width).copy_(
            F.normalize(drawn - drawn.mean(-1, keepdim=True), dim=-1)
        )
        self.register_buffer("centres", centres)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the number of the nearest centroid [B, H, T] for each vector of normed x [B, H, T, D]."""
        centres = self.centres.to(x.dtype)
        if x.is_cuda or x.shape[2] == 1:
            return (x @ centres.mT).argmax(-1)
        count = centres.shape[1]
        more = centres[:, :1].expand(-1, -count % LANES, -1)
        centres = torch.cat([centres, more], 1).mT.contiguous()  # [H, D, W]
        reversed_numbers, width = x.new_empty(x.shape[:3]), centres.shape[2]
        run = max(1, min(x.shape[2], cache_capacity(x) // width))
        scores, best = x.new_empty(2, run, width)
        # Descending numbers, so that the maximum over equal scores is the first index.
        down = torch.arange(width, 0, -1, dtype=x.dtype, device=x.device)
        for row, row_numbers in zip(x, reversed_numbers):
            for head, own, head_numbers in zip(row, centres, row_numbers):
                for vectors, numbers in zip(head.split(run), head_numbers.split(run)):
                    score = torch.mm(vectors, own, out=scores[: len(vectors)])
                    top = score.amax(-1, keepdim=True)
                    first = torch.eq(score, top, out=best[: len(vectors)]).mul_(down)
                    torch.amax(first, -1, out=numbers)
        numbers = width - reversed_numbers.long()
        return numbers.masked_fill_(numbers >= count, 0)  # a copy of centroid 0, or NaN

    def update_after_backward(self, queries: Chosen, keys: Chosen) -> None:
        """Move the centroids in training, once the gradient of the queries is computed."""
        if self.training and queries[0].requires_grad:
            chosen = [(x.detach(), clusters, real) for x, clusters, real in (queries, keys)]
            queries[0].register_hook(lambda _: self._update(chosen))

    @torch.no_grad()
    def _update(self, chosen: list[Chosen]) -> None:
        old = self.centres.to(torch.promote_types(self.centres.dtype, torch.float32))
        sums = torch.zeros_like(old)
        for vectors in chosen:
            self._add_to_sums(sums, *vectors)
        # All processes must move their centroids alike.
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        new = F.normalize(self.decay * old + (1 - self.decay) * F.normalize(sums, dim=-1), dim=-1)
        has_members = sums.square().sum(-1, keepdim=True) > 0
        self.centres.copy_(torch.where(has_members, new, old))

    def _add_to_sums(self, sums: Tensor, x: Tensor, clusters: Tensor, real: Tensor | None) -> None:
        """Add the vectors of each cluster to its sum [H, C, D]."""
        heads, count, _ = sums.shape
        if real is not None:
            x = x * real[:, None, :, None]
        place = clusters + count * torch.arange(heads, device=x.device).view(-1, 1)
        # The memory layout of x, [B, T, H, D], which avoids copies.
        place, x = place.transpose(1, 2).flatten(), x.transpose(1, 2).flatten(0, 2)
        sums.flatten(0, 1).index_add_(0, place, x.to(sums.dtype))


def heads_of(position: PositionTerms, heads: slice, num_heads: int) -> ScoreTerms | None:
    """Return the scheme for `heads` of `num_heads` heads; unchanged if these are all heads."""
    own = range(num_heads)[heads]
    return position if position is None or len(own) == num_heads else HeadSubset(position, own, num_heads)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadSubset(DelegatedTerms):
    """A scheme evaluated for all heads, with zeros as queries and keys of the other heads."""

    heads: range
    num_heads: int

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """Return none: no mechanism that computes heads in different ways rotates sets of pairs."""
        return ()

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """Return the scheme's score function with heads counted from the first of these heads."""
        mod = self.position.score_mod(self._pad_heads(q), self._pad_heads(k), context)
        if mod is None:
            return None
        first = self.heads.start

        def of_heads(part: ScoreMod) -> ScoreMod:
            return broadcasts(lambda score, b, h, q_idx, kv_idx: part(score, b, h + first, q_idx, kv_idx))

        return chain_score_mods(step(name)(of_heads(part)) for name, part in steps_of(mod))

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the scheme's terms by distance, restricted to these heads."""
        relative = self.position.relative(self._pad_heads(q), self._pad_heads(k), context)
        return None if relative is None else relative.select_heads(list(self.heads), self.num_heads)

    def _pad_heads(self, x: Tensor) -> Tensor:
        """Return x [B, h, T, D] of these heads padded to all heads, [B, H, T, D]."""
        # A scheme has tables for all heads and expects all of them.
        return F.pad(x, (0, 0, 0, 0, self.heads.start, self.num_heads - self.heads.stop))


Decay = Annotated[float, Interval(ge=0, lt=1), Wording(fix="0.999 is the paper's")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingConfig(MechanismConfig):
    """Routing attention: tokens attend within clusters that k-means finds by content.

    `window` counts keys of the same cluster, `local_window` the preceding keys, including the token itself.
    """

    clusters: PositiveInt = 16  # of each routed head; the root of the length costs least
    window: PositiveInt = 256
    local_heads: NonNegativeInt | None = None  # the first heads; by default half of all, rounded down
    local_window: Annotated[int, Ge(2)] = 256
    decay: Decay = 0.999  # of the moving average of the centroids, a training step
    share_queries: bool = False  # the keys are the queries
    backend: MechanismBackend = "auto"  # "definition": all pairs at once

    kind: ClassVar[str] = "routing"
    paper: ClassVar[str] = "Roy et al. 2021, section 4"
    eager: ClassVar[str] = "the sizes of its tiles depend on how many tokens chose each cluster"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares_queries", self.share_queries)

    def num_local(self, num_heads: int) -> int:
        """Return the number of local heads among `num_heads` heads."""
        num_local = num_heads // 2 if self.local_heads is None else self.local_heads
        if num_local >= num_heads:
            raise InputError(
                f"local_heads: expected fewer than the {num_heads} heads, so that at least one is routed, "
                f"got {num_local}; for local heads only use 'softmax' with a Window"
            )
        return num_local

    def build(self, num_heads: int, head_size: int) -> "Routing":
        return Routing(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["RoutingConfig", ...]:
        # With these sizes no token of the contract tests is so close to two centroids that rounding decides.
        return (
            cls(clusters=2, window=3, local_window=3),
            cls(clusters=3, window=3, local_window=3, decay=0.5),
            cls(clusters=3, window=8, local_heads=0, share_queries=True),
        )


@dataclasses.dataclass(frozen=True)
class RoutingState(StateOfStates):
    """KV caches: of the local heads; of normed keys and values of the routed heads; of the keys' clusters."""

    local: State | None
    routed: KeyValueCache
    clusters: KeyValueCache


class Routing(Mechanism):
    """Attention with local heads first and routed heads after them."""

    def __init__(self, config: RoutingConfig, num_heads: int, head_size: int):
        super().__init__()
        self.config, self.num_local = config, config.num_local(num_heads)
        window = {"kind": "softmax", "pattern": f"Window({config.local_window - 1})"}
        local = MechanismConfig.from_dict(window)
        local = local.definition() if config.backend == "definition" else local
        self.local = local.build(self.num_local, head_size) if self.num_local else None
        self.centroids = Centroids(num_heads - self.num_local, config.clusters, head_size, config.decay)

    def new_state(self, reserve: int) -> RoutingState:
        local = None if self.local is None else self.local.new_state(reserve)
        return RoutingState(local, KeyValueCache(reserve=reserve), KeyValueCache(reserve=reserve))

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Compute local heads by their window and others by clusters; in training, update the centroids."""
        assert isinstance(state, RoutingState | None)
        if self.training and state is None and self.config.clusters > q.shape[2]:
            raise InputError(
                f"clusters: expected at most the {q.shape[2]} tokens of a training row, "
                f"got {self.config.clusters}; use longer rows or fewer clusters"
            )
        groups, num_local = q.shape[1] // k.shape[1], self.num_local
        if groups > 1:
            # Every query head has its own centroids, so grouped keys may be in different clusters.
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        parts, weights, local = [], [], None
        if self.local is not None:
            with _collect_weights(weights):
                y, local = self.local(
                    q[:, :num_local],
                    k[:, :num_local],
                    v[:, :num_local],
                    context,
                    None if state is None else state.local,
                    heads_of(position, slice(num_local), q.shape[1]),
                )
            parts.append(y)
        position = heads_of(position, slice(num_local, None), q.shape[1])
        with _collect_weights(weights):
            y, state = self._route(
                q[:, num_local:], k[:, num_local:], v[:, num_local:], context, state, position
            )
        parts.append(y.to(q.dtype))
        if weights:
            record(torch.cat(weights, 1))
        state = None if state is None else dataclasses.replace(state, local=local)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1), state

    def _route(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: RoutingState | None,
        position: PositionTerms,
    ) -> tuple[Tensor, RoutingState | None]:
        dtype, exact = q.dtype, torch.promote_types(q.dtype, torch.float32)
        with without_autocast(q):
            q, k = normed(q.to(exact)), normed(k.to(exact))
            query_clusters, key_clusters = self.centroids(q), self.centroids(k)
        spread = (0, 0, self.num_local, 0)  # local heads have no clusters
        record_mark("cluster of queries", lambda: F.pad(query_clusters, spread, value=-1), "queries")
        record_mark("cluster of keys", lambda: F.pad(key_clusters, spread, value=-1), "keys")
        new_valid = None if context.kv_valid is None else context.kv_valid[:, -k.shape[2] :].bool()
        self.centroids.update_after_backward(
            (q, query_clusters, context.q_valid), (k, key_clusters, new_valid)
        )
        if state is not None:
            k, v, routed = state.routed.append(k, v)
            # Clusters are cached as keys of width 1, with values of width 0.
            column = key_clusters.unsqueeze(-1)
            column, _, clusters = state.clusters.append(column, column[..., :0])
            key_clusters, state = column.squeeze(-1), RoutingState(None, routed, clusters)
        terms = PairTerms.of(position, q.to(dtype), k, context, q.shape[3] ** -0.5)
        heads = RoutedHeads(q, k, v.to(exact), query_clusters, key_clusters, terms)
        with without_autocast(q):
            return self._attend(heads, context), state

    def _attend(self, heads: RoutedHeads, context: Context) -> Tensor:
        config = self.config
        # For a single query sorting the keys costs more than reading all of them.
        single = context.causal and heads.q.shape[2] == 1
        if single or recording() or config.backend == "definition":
            return definition(heads, context, config.window, config.share_queries)
        clusters = placeholder_clusters(heads.query_clusters, heads.key_clusters, config.clusters)
        intervals = cluster_intervals(
            *clusters, config.clusters, config.window, context, config.share_queries
        )
        if heads.terms is not None:
            return interval_attention_with_terms(heads, intervals, config.window, heads.terms)
        return interval_attention(heads.q, heads.k, heads.v, intervals, heads.scale)


@contextlib.contextmanager
def _collect_weights(weights: list[Tensor]) -> Iterator[None]:
    """Collect the weights recorded inside the context in this list, if weights are recorded."""
    if not recording():
        yield
        return
    with recorded() as records:
        yield
    weights += records
