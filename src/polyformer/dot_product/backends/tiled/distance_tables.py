"""`Relative` as tiles read it: tables over the distances that a call looks at, in the order of the key slots.

The Q queries and K keys of a tile are Q + K - 1 distances apart. With `x[i, m]` what query i has for distance
m, score (i, j) needs `x[i, j - i + Q - 1]`: a view of the product whose rows are one entry shorter than they
are, so nothing is gathered (the shift of Dai et al. 2019, appendix B, without the copy).
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from polyformer.dot_product.backends.tiled.work_items import WorkItem
from polyformer.dot_product.relative import Relative

NAMES = "content", "bias", "keys", "values", "queries"
STEP = 16
"""Products of so many columns, or a multiple, run fastest; so far the tables go beyond the distances."""


@dataclasses.dataclass(frozen=True, eq=False)
class DistanceTables:
    """`Relative` over the distances that a call looks at, in the order in which tiles read it.

    content: [B, H, Tq, D] or None, where it is the queries. bias [H or 1, R], keys [H or 1, R, D] and values
    [H or 1, R, Dv] have their entries by key slot minus query slot, rising from `-greatest`; queries
    [H or 1, R, D], which the keys meet, by query slot minus key slot, rising from `least`.
    """

    least: int
    greatest: int
    content: Tensor | None = None
    bias: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    queries: Tensor | None = None

    @staticmethod
    def from_relative(relative: Relative, items: Sequence[WorkItem], offset: int) -> "DistanceTables":
        """The tables over the distances that the work items of a call look at, differentiably."""
        tiles = [tile for item in items for row in item.rows for tile in row]
        least = min((tile.start + offset - tile.keys[-1][1] + 1 for tile in tiles), default=0)
        greatest = max((tile.stop - 1 + offset - tile.keys[0][0] for tile in tiles), default=0)
        least, greatest = least - STEP, greatest + STEP
        tables = relative.over(least, greatest).tables
        flipped = {name.removeprefix("position_"): table.flip(1) for name, table in tables.items()}
        if "queries" in flipped:
            flipped["queries"] = tables["position_queries"]
        content = relative.content if "keys" in flipped else None
        return DistanceTables(least, greatest, content=content, **flipped)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: tensor for name in NAMES if (tensor := getattr(self, name)) is not None}

    def with_tensors(self, tensors: Sequence[Tensor]) -> "DistanceTables":
        """The same with other tensors, in the order of `tensors`."""
        return dataclasses.replace(self, **dict(zip(self.tensors, tensors)))

    def zero_gradients(self, needed: Sequence[bool]) -> "DistanceTables":
        """Zeros for those of the tensors whose gradients are needed, in their order."""
        # Not zeros_like, which keeps the order of the axes in memory: work items write to views of these.
        zeros = [x.new_zeros(x.shape) if need else None for x, need in zip(self.tensors.values(), needed)]
        return dataclasses.replace(self, **dict(zip(self.tensors, zeros)))

    def scaled(self, scale: float, like: "DistanceTables") -> list[Tensor | None]:
        """Gradients in the order of `like`'s tensors; the bias is added to scores that are scaled already."""
        grads = [getattr(self, name) for name in like.tensors]
        for name, grad in zip(like.tensors, grads):
            if grad is not None and name not in ("bias", "values"):
                grad.mul_(scale)
        return grads


def entries(queries: int, keys: int) -> int:
    """How many distances a product takes for a tile: those that there are, and a few more."""
    return -(-(queries + keys - 1) // STEP) * STEP


def diagonals(by_distance: Tensor, width: int) -> Tensor:
    """x [M, Q, entries], contiguous, as a view [M, Q, width]: (i, j) is x[i, j - i + Q - 1]."""
    matrices, queries, length = by_distance.shape
    strides = queries * length, length - 1, 1
    return by_distance.as_strided(
        (matrices, queries, width), strides, by_distance.storage_offset() + queries - 1
    )
