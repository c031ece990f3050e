"""Transformer-XL's relative positions: sinusoids of the distance, projected to keys, and two global queries.

    score_ij = ((q_i + u) . k_j + (q_i + v) . (W_R R_(i-j))) / sqrt(D)

R is the sinusoid of the distance and W_R [E, H D] a projection of each layer's own; u and v [H, D] say what
all queries look for, by content and by distance. They are each layer's own, or with `shared_biases` those of
the whole stack (`untie_r=False` in the authors' code). u and v start at zero. Only the distances of the call
are projected: R E H D for R of them. Dai et al. 2019, section 3.3.

The channels of R are ordered as in `sinusoids`, the authors' code has all sines first: weights of W_R from
there need their columns reordered. `clamp_distance` is `clamp_len` there; from there also dropout on R.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.dot_product.relative import Relative
from polyformer.ops.dropout import Dropout
from polyformer.ops.linear import Linear
from polyformer.position.base import Position, PositionConfig, Shape, Site, sinusoids
from polyformer.sequence.context import Context


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


class TransformerXL(Position):
    """u and v [H, 1, D] of every layer, or of all in one, and W_R of every layer."""

    adds_to_queries = True

    def __init__(self, config: TransformerXLConfig, shape: Shape):
        super().__init__()
        self.config, self.hidden_size, self.num_heads = config, shape.hidden_size, shape.num_heads
        layers = range(1 if config.shared_biases else shape.num_layers)
        zeros = [torch.zeros(shape.num_heads, 1, shape.head_size) for _ in layers]
        self.u = nn.ParameterList(nn.Parameter(start.clone()) for start in zeros)
        self.v = nn.ParameterList(nn.Parameter(start.clone()) for start in zeros)
        self.dropout = Dropout(config.waves_dropout)
        inner = shape.num_heads * shape.head_size
        self.projections = nn.ModuleList(
            Linear(shape.hidden_size, inner, bias=False) for _ in range(shape.num_layers)
        )

    def rotate(self, q: Tensor, k: Tensor, context: Context, site: Site) -> tuple[Tensor, Tensor]:
        """q + u: the mechanism's own product is then the first term of the scores."""
        return q + self.u[site.layer % len(self.u)].to(q.dtype), k

    def relative(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Relative:
        """q_i + v meets W_R R_d for every distance d of the call."""
        waves = context.once(
            (self.config, self.hidden_size, q.dtype, q.device),
            lambda: self.dropout(self._waves(q, context)),
        )
        keys = self.projections[site.layer](waves).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)
        own = site.layer % len(self.u)
        turn = (self.v[own] - self.u[own]).to(q.dtype)
        return Relative(first=context.distances[0], content=q + turn, position_keys=keys)

    def _waves(self, q: Tensor, context: Context) -> Tensor:
        """R of the distances of the call, [distances, E]."""
        least, greatest = context.distances
        distance, limit = torch.arange(least, greatest + 1, device=q.device), self.config.clamp_distance
        if limit is not None:
            distance = distance.clamp(-limit, limit)
        return sinusoids(distance, self.hidden_size).to(q.dtype)
