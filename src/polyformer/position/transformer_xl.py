"""Transformer-XL's relative positions: sinusoids of the distance, projected to keys, and two global queries.

    score_ij = ((q_i + u) . k_j + (q_i + v) . (W_R R_(i-j))) / sqrt(D)

R is the sinusoid of the distance and W_R [E, H D] a projection of each layer's own; u and v [H, D] say what
all queries look for, by content and by distance. They are each layer's own, or with `shared_biases` those of
the whole stack (`untie_r=False` in the authors' code). u and v start at zero. Only the distances of the call
are projected: R E H D for R of them. In evaluation the projections of a CPU are kept for calls of few tokens
after many, such as steps of decoding, as long as W_R stays what it was. Dai et al. 2019, section 3.3.

The channels of R are ordered as in `sinusoids`, the authors' code has all sines first: weights of W_R from
there need their columns reordered. `clamp_distance` is `clamp_len` there; from there also dropout on R.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.dot_product.relative import Relative
from polyformer.dot_product.request import is_autocast, is_traced, transformed
from polyformer.ops.dropout import Dropout
from polyformer.ops.linear import Linear, is_plain
from polyformer.position.base import Position, PositionConfig, Shape, Site, sinusoids
from polyformer.sequence.context import Context

BLOCK = 64
"""Distances that are projected at once to be kept, at first, and then as many as there are: always the same
ones together, so that what was computed before does not change a bit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(PositionConfig):
    """Projected sinusoids of distances."""

    shared_biases: bool = False  # u and v of all layers are the same
    clamp_distance: int | None = None  # farther tokens count as this far; None for no limit
    waves_dropout: float = 0.0  # of the sinusoids R, in training: one draw for all layers of a call

    kind: ClassVar[str] = "transformer_xl"
    paper: ClassVar[str] = "Dai et al. 2019 (Transformer-XL), section 3.3"

    def __post_init__(self) -> None:
        if self.clamp_distance is not None and self.clamp_distance < 1:
            raise InputError(f"clamp_distance: expected 1 token or more, or none, got {self.clamp_distance}")
        if not 0.0 <= self.waves_dropout < 1.0:
            raise InputError(f"waves_dropout: expected a probability in [0, 1), got {self.waves_dropout}")

    def build(self, shape: Shape) -> "TransformerXL":
        """The module of the scheme, for a whole stack."""
        return TransformerXL(self, shape)

    @classmethod
    def examples(cls) -> tuple["TransformerXLConfig", ...]:
        """Small instances that the contract tests run."""
        return cls(), cls(shared_biases=True, clamp_distance=5)


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """W_R R_d [H, n, D] of the distances 0, 1, ..., n - 1, and W_R as it was."""

    keys: Tensor
    weight: Tensor

    def is_of(self, weight: Tensor) -> bool:
        """Whether W_R is the same still; numbers are compared, as not every write leaves a trace."""
        return self.weight.dtype == weight.dtype and torch.equal(self.weight, weight)


class TransformerXL(Position):
    """u and v [H, 1, D] of every layer, or of all in one, and W_R of every layer."""

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
        self._kept: dict[tuple[int, torch.dtype], Kept] = {}

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """q + u: the mechanism's own product is then the first term of the scores."""
        return q + self.u[site.layer % len(self.u)].to(q.dtype), k

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """q_i + v meets W_R R_d for every distance d of the call."""
        keys = self._kept_keys(q, context, site.layer)
        if keys is None:
            waves = context.once(
                (self.config, self.hidden_size, q.dtype, q.device),
                lambda: self.dropout(self._waves(q, *context.distances)),
            )
            keys = self._projected(waves, site.layer)
        own = site.layer % len(self.u)
        turn = (self.v[own] - self.u[own]).to(q.dtype)
        return Relative(first=context.distances[0], content=q + turn, position_keys=keys)

    def _projected(self, waves: Tensor, layer: int) -> Tensor:
        """W_R R [H, distances, D] of waves R [distances, E]."""
        return self.projections[layer](waves).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def _kept_keys(self, q: Tensor, context: Context, layer: int) -> Tensor | None:
        """W_R R of the distances of the call, kept from call to call; None where somebody follows or changes
        it, and where it is not most of the work."""
        if torch.is_grad_enabled() or self.training:
            self._kept.clear()
            return None
        least, greatest = context.distances
        linear = self.projections[layer]
        if least < 0 or 2 * context.q_len > greatest or q.device.type != "cpu" or not is_plain(linear):
            return None
        if is_traced() or transformed() or is_autocast("cpu"):
            return None
        kept = self._kept.get((layer, q.dtype))
        if kept is None or not kept.is_of(linear.weight):
            keys = self._projected(self._waves(q, 0, BLOCK - 1), layer)
            kept = Kept(keys, linear.weight.detach().clone())
        while (count := kept.keys.shape[1]) <= greatest:
            more = self._projected(self._waves(q, count, 2 * count - 1), layer)
            kept = dataclasses.replace(kept, keys=torch.cat([kept.keys, more], 1))
        self._kept[layer, q.dtype] = kept
        return kept.keys[:, least : greatest + 1]

    def _waves(self, q: Tensor, least: int, greatest: int) -> Tensor:
        """R of the distances from `least` to `greatest`, [distances, E]."""
        distance, limit = torch.arange(least, greatest + 1, device=q.device), self.config.clamp_distance
        if limit is not None:
            distance = distance.clamp(-limit, limit)
        return sinusoids(distance, self.hidden_size).to(q.dtype)
