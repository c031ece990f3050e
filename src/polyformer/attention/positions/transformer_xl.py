"""Transformer-XL's relative positions: sinusoids of the distance, projected to keys, and two global queries.

    score_ij = ((q_i + u) . k_j + (q_i + v) . (W_R R_(i-j))) / sqrt(D)

R is the sinusoid of the distance and W_R [E, H D] a projection, separate per layer. u and v [H, D] are added
to all queries, for content and for distance. They are separate per layer, or with `shared_biases` shared by
the whole stack (`untie_r=False` in the authors' code). u and v start at zero. Only the distances of the call
are projected, at a cost of R E H D for R distances. In evaluation on a CPU the projections are cached for
calls with few new tokens after many, such as steps of decoding, until W_R changes. Dai et al. 2019, section
3.3.

The channels of R are ordered as in `sinusoids`. The authors' code has all sines first, so weights of W_R from
that code need their columns reordered. `clamp_distance` is called `clamp_len` there; the dropout on R is also
from that code.

XLNet adds a term for whether two tokens are of the same segment (Yang et al. 2019, section 2.5):

    score_ij = ((q_i + u) . k_j + (q_i + v) . (W_R R_(i-j)) + (q_i + w) . s_ij) / sqrt(D)

s_ij is s_0 if tokens i and j are of the same segment, else s_1: two vectors [H, D] of each layer. w [H, D]
is added to all queries, as u and v are. Without segments all pairs have s_0, which changes no weight, and the
term is left out.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import is_traced, transformed
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site, sinusoids
from polyformer.core.ops.autograd import is_autocast
from polyformer.core.ops.layers import Dropout
from polyformer.core.ops.linear import Linear, is_plain
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.core.sequence.context import Context

FIRST_DISTANCES = 64
"""Number of distances in the first projection for the cache; each further projection doubles the cache.

The same distances are always projected together, so that results do not depend on earlier calls by a bit.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(PositionConfig):
    """Transformer-XL positions: projected sinusoids of distances are further keys in the scores."""

    shared_biases: bool = False  # u and v are shared by all layers
    clamp_distance: PositiveInt | None = None  # greater distances are clamped to it, in tokens; None: never
    waves_dropout: Probability = 0.0  # of R in training: the same mask for all layers of a call

    kind: ClassVar[str] = "transformer_xl"
    paper: ClassVar[str] = "Dai et al. 2019 (Transformer-XL), section 3.3"

    def build(self, shape: Shape) -> "TransformerXL":
        return TransformerXL(self, shape)

    @classmethod
    def examples(cls) -> tuple["TransformerXLConfig", ...]:
        return cls(), cls(shared_biases=True, clamp_distance=5)


@dataclasses.dataclass(frozen=True, eq=False)
class ProjectedDistances:
    """A cache of W_R R_d [H, n, D] for the distances 0, 1, ..., n - 1, with a copy of its W_R."""

    keys: Tensor
    weight: Tensor

    def matches(self, weight: Tensor) -> bool:
        """Return whether W_R is unchanged; the values are compared because not every write is recorded."""
        return self.weight.dtype == weight.dtype and torch.equal(self.weight, weight)


class TransformerXL(Position):
    """Parameters u and v [H, 1, D], per layer or shared by all layers, and W_R of every layer."""

    counts_in_cache = True

    adds_to_queries = True

    def __init__(self, config: TransformerXLConfig, shape: Shape):
        super().__init__()
        self.config, self.hidden_size, self.num_heads = config, shape.hidden_size, shape.num_heads
        self.farthest = config.clamp_distance
        layers = range(1 if config.shared_biases else shape.num_layers)
        zeros = [torch.zeros(shape.num_heads, 1, shape.head_size) for _ in layers]
        self.u = nn.ParameterList(nn.Parameter(start.clone()) for start in zeros)
        self.v = nn.ParameterList(nn.Parameter(start.clone()) for start in zeros)
        self.dropout = Dropout(config.waves_dropout)
        inner = shape.num_heads * shape.head_size
        self.projections = nn.ModuleList(
            Linear(shape.hidden_size, inner, bias=False) for _ in range(shape.num_layers)
        )
        self._cache: dict[tuple[int, torch.dtype], ProjectedDistances] = {}

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """Return q + u: the product of the mechanism is then the first term of the scores."""
        return q + self.u[site.layer % len(self.u)].to(q.dtype), k

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return q_i + v and W_R R_d for every distance d of the call: their product is the second term."""
        keys = self._cached_keys(q, context, site.layer)
        if keys is None:
            waves = context.once(
                (self.config, self.hidden_size, q.dtype, q.device),
                lambda: self.dropout(self._waves(q, *context.distances)),
            )
            keys = self._project(waves, site.layer)
        # `rotate` has added u to q, so v - u turns q + u into q + v.
        own = site.layer % len(self.u)
        turn = (self.v[own] - self.u[own]).to(q.dtype)
        return Relative(first=context.distances[0], content=q + turn, position_keys=keys)

    def _project(self, waves: Tensor, layer: int) -> Tensor:
        """Return W_R R [H, distances, D] of waves R [distances, E]."""
        return self.projections[layer](waves).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def _cached_keys(self, q: Tensor, context: Context, layer: int) -> Tensor | None:
        """Return W_R R of the distances of the call from a cache that lasts across calls.

        Return None if gradients, tracing or autocast prevent caching, or if the projection is not most of the
        work of the call.
        """
        if torch.is_grad_enabled() or self.training:
            self._cache.clear()
            return None
        least, greatest = context.distances
        linear = self.projections[layer]
        # With many queries the projection is a small part of the work, and a cache would only cost memory.
        if least or 2 * context.q_len > greatest or q.device.type != "cpu" or not is_plain(linear):
            return None
        if is_traced() or transformed() or is_autocast("cpu"):
            return None
        cached = self._cache.get((layer, q.dtype))
        if cached is None or not cached.matches(linear.weight):
            keys = self._project(self._waves(q, 0, FIRST_DISTANCES - 1), layer)
            cached = ProjectedDistances(keys, linear.weight.detach().clone())
        while (count := cached.keys.shape[1]) <= greatest:
            more = self._project(self._waves(q, count, 2 * count - 1), layer)
            cached = dataclasses.replace(cached, keys=torch.cat([cached.keys, more], 1))
        self._cache[layer, q.dtype] = cached
        return cached.keys[:, least : greatest + 1]

    def _waves(self, q: Tensor, least: int, greatest: int) -> Tensor:
        """Return R [distances, E] of the distances from `least` to `greatest`."""
        distance, limit = torch.arange(least, greatest + 1, device=q.device), self.config.clamp_distance
        if limit is not None:
            distance = distance.clamp(-limit, limit)
        return sinusoids(distance, self.hidden_size).to(q.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class XLNetConfig(TransformerXLConfig):
    """XLNet positions: Transformer-XL's positions with a term for pairs of tokens of one segment or two."""

    kind: ClassVar[str] = "xlnet"
    paper: ClassVar[str] = "Yang et al. 2019 (XLNet), section 2.5"

    def build(self, shape: Shape) -> "XLNet":
        return XLNet(self, shape)

    @classmethod
    def examples(cls) -> tuple["XLNetConfig", ...]:
        return cls(), cls(shared_biases=True, clamp_distance=5)


class XLNet(TransformerXL):
    """Parameters of Transformer-XL, and w [H, 1, D] and s [2, H, D] of every layer."""

    def __init__(self, config: XLNetConfig, shape: Shape):
        super().__init__(config, shape)
        heads, width = shape.num_heads, shape.head_size
        self.w = nn.ParameterList(nn.Parameter(torch.zeros_like(start)) for start in self.u)
        self.segments = nn.ParameterList(
            nn.Parameter(torch.empty(2, heads, width).normal_(std=width**-0.5))
            for _ in range(shape.num_layers)
        )

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod | None:
        """Return a function that computes score + (q_i + w) . s_ij / sqrt(D); None without segments."""
        if context.q_segment is None:
            return None
        own = site.layer % len(self.u)
        # `rotate` has added u to q.
        content = (q + (self.w[own] - self.u[own]).to(q.dtype)) * q.shape[-1] ** -0.5
        terms = content @ self.segments[site.layer].to(q.dtype).permute(1, 2, 0)  # [B, H, Tq, 2]

        @step("query · vector of the segments")
        @broadcasts
        def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + terms[b, h, q_idx, (~context.same_segment(b, q_idx, kv_idx)).long()]

        return add
