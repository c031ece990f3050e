"""Terms of the scores that depend on the distance of query i and key j.

    alibi   score_ij = q_i . k_j / sqrt(D) - slope_h |i - j|
    t5      score_ij = q_i . k_j * scale + table[bucket(j - i), h]
    shaw    score_ij = q_i . (k_j + keys[clip(j - i)]) / sqrt(D)     clip(x) = max(-k, min(k, x)), k = `clip`
            out_i    = sum_j p_ij (v_j + values[clip(j - i)])
    da      p_ij = softmax_j(ReLU(q_i . k_j) f(w |i - j|) / sqrt(D))
            f(R) = (1 + e^b) / (1 + e^(b - R)), w and b of each head, in each layer

The first three are tables over distances, which backends read along diagonals (`functional.relative`); `da`
is a function of the score. h is the head.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import ChainedScoreMods, step
from polyformer.attention.positions.added import Learned
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.core.errors import InputError
from polyformer.core.host_values import tensor_on
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlibiConfig(PositionConfig):
    """ALiBi: a bias that falls linearly with distance is added to the scores of each head.

    ALiBi has no parameters. The slopes are a geometric series that starts at 2^(-8/H). If H is not a power of
    two, the remaining heads use every second slope of the series for twice the next lower power of two. A
    causal stack sees only distances of 0 and more. In an encoder the bias is the same on both sides (the
    symmetric form, which the paper leaves open). `slope_scale` multiplies all slopes: Falcon divides them by
    sqrt(D).
    """

    slope_scale: PositiveFloat = 1.0  # a factor of all slopes

    kind: ClassVar[str] = "alibi"
    paper: ClassVar[str] = "Press et al. 2022 (ALiBi), section 3"

    def build(self, shape: Shape) -> "Alibi":
        return Alibi(shape.num_heads, self.slope_scale)

    @classmethod
    def examples(cls) -> tuple["AlibiConfig", ...]:
        return cls(), cls(slope_scale=0.25)


class Alibi(Position):
    """Biases [H, R] for the R distances of a call."""

    adds_bias = True
    counts_in_cache = True

    def __init__(self, num_heads: int, slope_scale: float = 1.0):
        super().__init__()
        self.slope_scale = slope_scale
        self.slopes = [slope * slope_scale for slope in slopes(num_heads)]

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return bias[h, d] = -slope_h |d| for every distance d of the call."""
        # All layers share the biases of a call.
        return context.once(("alibi", self, q.dtype, q.device), lambda: self._biases(q, context))

    def _biases(self, q: Tensor, context: Context) -> Relative:
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device, dtype=q.dtype).abs()
        slopes = tensor_on(self.slopes, q.device, q.dtype)
        return Relative(first=least, bias=-slopes.unsqueeze(1) * distance)


def slopes(heads: int) -> list[float]:
    """Return the slope of each head: 2^(-8/H), 2^(-16/H), ... if H is a power of two."""
    power = 2 ** math.floor(math.log2(heads))
    series = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    # Every second slope of the longer series falls between two slopes of this series: no slope occurs twice.
    return series if power == heads else series + slopes(2 * power)[::2][: heads - power]


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5BiasConfig(PositionConfig):
    """T5 bias: a learned number for each head and bucket of distances is added to the scores.

    All layers share the table. Half of the buckets have a single distance each, the other half grow
    logarithmically up to `max_distance`; all farther distances share the last bucket. An encoder has half of
    the buckets for each side. T5 itself has no factor 1 / sqrt(D): its `scale` is 1, an option of the
    mechanism. MPNet has a table of learned positions too (Song et al. 2020).
    """

    num_buckets: int = 32
    max_distance: int = 128  # in tokens; all greater distances share a bucket
    absolute: bool = False  # whether a table of learned positions is added to the input
    offset: NonNegativeInt = 0  # first rows of that table, which belong to no position

    kind: ClassVar[str] = "t5"
    paper: ClassVar[str] = "Raffel et al. 2020 (T5), section 2.1"

    def __post_init__(self) -> None:
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise InputError(f"num_buckets: expected an even number of 4 or more, got {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 2:
            least = self.num_buckets // 2 + 1
            raise InputError(f"max_distance: expected {least} tokens or more, got {self.max_distance}")

    def build(self, shape: Shape) -> "T5Bias":
        return MPNetBias(self, shape) if self.absolute else T5Bias(self, shape)

    @classmethod
    def examples(cls) -> tuple["T5BiasConfig", ...]:
        return cls(), cls(absolute=True, offset=2)


class T5Bias(Position):
    """A table [num_buckets, H] of biases for the whole stack."""

    adds_bias = True
    counts_in_cache = True

    def __init__(self, config: T5BiasConfig, shape: Shape):
        super().__init__()
        self.config, self.farthest = config, config.max_distance
        self.table = nn.Embedding(config.num_buckets, shape.num_heads)

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return bias[h, d] = table[bucket(d), h] for every distance d of the call."""
        # With activation checkpointing, a tensor of one layer's region must not be used by other layers.
        if torch.is_grad_enabled():
            return self._biases(q, context)
        return context.once(("t5", self, q.dtype), lambda: self._biases(q, context))

    def _biases(self, q: Tensor, context: Context) -> Relative:
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device)
        entries = buckets(distance, self.config.num_buckets, self.config.max_distance, not context.causal)
        return Relative(first=least, bias=self.table(entries).T.to(q.dtype))


class MPNetBias(T5Bias):
    """T5's biases, and a table of learned positions that is added to the input."""

    counts_in_cache = False
    embeds_layers = False

    def __init__(self, config: T5BiasConfig, shape: Shape):
        super().__init__(config, shape)
        self.absolute = Learned([shape.input_size], shape.max_positions, config.offset)
        self.max_positions = shape.max_positions

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x plus the learned positions."""
        return self.absolute.embed(x, pos, layer)


def buckets(distance: Tensor, num_buckets: int, max_distance: int, both_sides: bool) -> Tensor:
    """Return the bucket of each distance (the position of the query minus the position of the key) as in T5.

    With `both_sides`, keys after the query have the second half; else they share the bucket of distance 0.
    """
    first = torch.zeros_like(distance)
    if both_sides:
        num_buckets //= 2
        first = torch.where(distance < 0, num_buckets, 0)
        distance = distance.abs()
    distance = distance.clamp_min(0)
    exact = num_buckets // 2
    # T5 computes its buckets in float32; float64 would move some boundaries by one.
    ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp_max(num_buckets - 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShawConfig(PositionConfig):
    """Relative positions of Shaw: learned vectors for clipped distances are added to keys (and values).

    Each layer has a table [2 clip + 1, D] of keys and a table of values, shared by its heads; entry x + k is
    for j - i = x. Without `values` only the keys are relative, which is faster and just as good in the paper
    (table 3). With `shared` all layers have the same tables, as in Sukhbaatar et al. 2019. The cost is a
    product of the queries with the table and sums of the probabilities by distance, never L x L x D.
    """

    clip: PositiveInt = 16  # tokens, from which on all distances share a vector
    values: bool = True  # relative values too
    shared: bool = False  # all layers share the tables

    kind: ClassVar[str] = "shaw"
    paper: ClassVar[str] = "Shaw et al. 2018, section 3"

    def build(self, shape: Shape) -> "Shaw":
        return Shaw(self, shape)

    @classmethod
    def examples(cls) -> tuple["ShawConfig", ...]:
        return cls(), cls(clip=3, values=False, shared=True)


class Shaw(Position):
    """Tables [2 clip + 1, D] of keys and values for each layer, or shared by all layers."""

    def __init__(self, config: ShawConfig, shape: Shape):
        super().__init__()
        self.clip = self.farthest = config.clip
        size, layers = (2 * config.clip + 1, shape.head_size), range(1 if config.shared else shape.num_layers)
        self.keys = nn.ModuleList(nn.Embedding(*size) for _ in layers)
        self.values = nn.ModuleList(nn.Embedding(*size) for _ in layers if config.values)

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """Return keys[clip(j - i)] and values[clip(j - i)] for every distance of the call."""
        # `distance` is i - j, the tables are indexed by j - i: hence the minus sign.
        least, greatest = context.distances
        distance = torch.arange(least, greatest + 1, device=q.device)
        entry = self.clip - distance.clamp(-self.clip, self.clip)
        table = min(site.layer, len(self.keys) - 1)
        return Relative(
            first=least,
            position_keys=self.keys[table](entry).to(q.dtype).unsqueeze(0),
            position_values=self.values[table](entry).to(q.dtype).unsqueeze(0) if self.values else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceAwareConfig(PositionConfig):
    """DA-Transformer positions: a learned function of distance rescales clipped scores.

    f is monotone and 1 at distance 0. It ranges from 0 (R to minus infinity: w < 0, a head that prefers near
    keys) to 1 + e^b (R to infinity: w > 0, a head that prefers far keys). w and b start at 0, where f is 1
    everywhere. The cost is a few operations per score and no memory.
    """

    kind: ClassVar[str] = "da"
    paper: ClassVar[str] = "Wu et al. 2021 (DA-Transformer), section 3"

    def build(self, shape: Shape) -> "DistanceAware":
        return DistanceAware(shape.num_layers, shape.num_heads)


class DistanceAware(Position):
    """Parameters w and b [layers, H] of the rescaling function."""

    def __init__(self, num_layers: int, num_heads: int):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_layers, num_heads))
        self.b = nn.Parameter(torch.zeros(num_layers, num_heads))

    def score_mod(self, q: Tensor, k: Tensor, context: Context, site: Site) -> ScoreMod:
        """Return a function that computes relu(score) f(w_h |i - j|)."""
        dtype = torch.promote_types(self.w.dtype, torch.float32)  # scores are never in half precision
        w, b = (table[site.layer].to(dtype) for table in (self.w, self.b))

        @step("clipped at zero: ReLU")
        @broadcasts
        def clip(score: Tensor, row: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score.relu()

        @step("rescaled by distance: times f(w |i - j|)")
        @broadcasts
        def rescale(score: Tensor, row: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            distance = context.distance(q_idx, kv_idx).abs()
            return score * rescaling(w[h] * distance, b[h])

        return ChainedScoreMods((clip, rescale))


def rescaling(distance: Tensor, b: Tensor) -> Tensor:
    """Return f(R) = (1 + e^b) / (1 + e^(b - R)), computed for each pair: faster than a lookup by distance."""
    b = b.clamp(max=80)  # e^b overflows for greater b; f is then e^R to the precision of float32
    return (distance - b).sigmoid() * (1 + b.exp())
