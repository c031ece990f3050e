"""T5's relative positions: a learned bias for each head and each bucket of distances, shared by all layers.

    score_ij = q_i . k_j * scale + table[bucket(j - i), h]

Half of the buckets have a single distance each, the other half grow logarithmically up to `max_distance`; all
farther distances share the last bucket. An encoder has half of the buckets for each side. T5 itself has no
factor 1 / sqrt(D): its `scale` is 1, an option of the mechanism. MPNet has a table of learned positions too.
Raffel et al. 2020, section 2.1; Song et al. 2020.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.attention.positions.learned import Learned
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5BiasConfig(PositionConfig):
    """T5 bias: a learned number for each head and bucket of distances is added to the scores."""

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
        return T5Bias(self, shape)

    @classmethod
    def examples(cls) -> tuple["T5BiasConfig", ...]:
        return cls(), cls(absolute=True, offset=2)


class T5Bias(Position):
    """A table [num_buckets, H] of biases for the whole stack."""

    adds_bias = True
    counts_in_cache = True

    embeds_layers = False

    def __init__(self, config: T5BiasConfig, shape: Shape):
        super().__init__()
        self.config, self.farthest = config, config.max_distance
        self.table = nn.Embedding(config.num_buckets, shape.num_heads)
        self.absolute: Learned | None = None
        if config.absolute:
            self.absolute = Learned([shape.input_size], shape.max_positions, config.offset)
            self.max_positions, self.counts_in_cache = shape.max_positions, False

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x plus the learned positions, if there are any."""
        return x if self.absolute is None else self.absolute.embed(x, pos, layer)

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
