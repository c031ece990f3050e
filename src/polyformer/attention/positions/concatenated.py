"""Concatenated positions: the position vector is concatenated to the token vector, not added to it.

    y_p = W [x_p ; s_p] = W_x x_p + W_s s_p        W = [W_x W_s]: [E, d + width],  x_p: [d],  s_p: [width]

s_p is the vector of any scheme that adds a vector for each position (`vectors`). If `embedding.size` is
d = E - width, there is no W: y_p = [x_p ; s_p], and the matrices of the first layer take its role.
A linear map of a concatenation is a sum of two maps: adding s_p (width = d = E) is the case W_x = W_s = I.
Unlike addition, concatenation leaves channels that no position enters. W costs E (d + width) parameters. The
number of positions is the limit of `vectors`.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyformer.attention.positions.base import Position, PositionConfig, Shape
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.linear import Linear
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConcatenatedConfig(PositionConfig):
    """Concatenated positions: position vectors are concatenated to token vectors, not added to them.

    `width`: the channels of the position vectors. `vectors`: the scheme that computes them, by default
    sinusoids.
    """

    width: PositiveInt = 32
    vectors: PositionConfig = dataclasses.field(
        default_factory=lambda: PositionConfig.from_dict("sinusoidal", "vectors")
    )

    kind: ClassVar[str] = "concatenated"

    def __post_init__(self) -> None:
        if not self.vectors.adds_vector:
            able = sorted(
                kind
                for kind, member in PositionConfig.kinds.items()
                if issubclass(member, PositionConfig) and member.adds_vector
            )
            raise InputError(
                f"vectors: expected a scheme that adds a vector for each position, {', '.join(able)}; "
                f"got {quote(self.vectors.kind)}"
            )

    @classmethod
    def examples(cls) -> tuple["ConcatenatedConfig", ...]:
        learned = PositionConfig.from_dict({"kind": "learned", "offset": 2}, "vectors")
        return cls(width=6), cls(width=5, vectors=learned)

    def with_max_positions(self, before: int, after: int) -> "ConcatenatedConfig":
        """Return the configuration with `vectors` for `after` positions."""
        return dataclasses.replace(self, vectors=self.vectors.with_max_positions(before, after))

    def build(self, shape: Shape) -> "Concatenated":
        return Concatenated(self, shape)


class Concatenated(Position):
    """The module of the position vectors, and the matrix W if the widths require it."""

    embeds_layers = False

    projects_input = True

    def __init__(self, config: ConcatenatedConfig, shape: Shape):
        super().__init__()
        self.width = config.width
        self.vectors = config.vectors.build(
            # The inner scheme is built for a stack as wide as its vectors.
            dataclasses.replace(shape, hidden_size=config.width, embedding_size=None)
        )
        self.max_positions = self.vectors.max_positions
        self.offset = getattr(self.vectors, "offset", 0)
        size = shape.input_size + config.width
        self.projection = (
            nn.Identity() if size == shape.hidden_size else Linear(size, shape.hidden_size, bias=False)
        )

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return W [x_p ; s_p] of x [B, T, d] at the first layer, and x at all others."""
        if layer:
            return x
        # The scheme adds its vectors to an input; added to zeros they remain unchanged.
        vectors = self.vectors.embed(x.new_zeros(*pos.shape, self.width), pos, 0)
        return self.projection(torch.cat([x, vectors.to(x.dtype).expand(*x.shape[:-1], -1)], -1))
