"""Shaw's relative positions: a learned vector for each clipped distance is added to keys and to values.

    score_ij = q_i . (k_j + keys[clip(j - i)]) / sqrt(D)        clip(x) = max(-k, min(k, x)), k = `clip`
    out_i    = sum_j p_ij (v_j + values[clip(j - i)])

Each layer has a table [2 clip + 1, D] of keys and a table of values, shared by its heads; entry x + k is for
j - i = x. Without `values` only the keys are relative, which is faster and just as good in the paper (table
3). With `shared` all layers have the same tables, as in Sukhbaatar et al. 2019. The cost is a product of the
queries with the table and sums of the probabilities by distance, never L x L x D. Shaw et al. 2018, sections
3.2 and 3.3.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.positions.base import Position, PositionConfig, Shape, Site
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShawConfig(PositionConfig):
    """Relative positions of Shaw: learned vectors for clipped distances are added to keys (and values)."""

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
