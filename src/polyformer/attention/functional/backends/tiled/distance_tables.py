"""`Relative` in the form for tiles: tables over the distances of a call, in the order of the key slots.

The Q queries and K keys of a tile have Q + K - 1 different distances. If `x[i, m]` is the term of query i for
distance m, score (i, j) needs `x[i, j - i + Q - 1]`. This is a view of the product with a row stride that is
shorter by 1, so that no gather is needed (the shift of Dai et al. 2019, appendix B, without the copy).
"""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from polyformer.attention.functional.backends.tiled.work_items import WorkItem
from polyformer.attention.functional.relative import Relative

NAMES = "content", "bias", "keys", "values", "queries"
STEP = 16
"""Products with a multiple of this number of columns are fastest; the tables have this many extra entries."""


@dataclasses.dataclass(frozen=True, eq=False)
class DistanceTables:
    """Tables of `Relative` over the distances of a call, in the order in which tiles read them.

    content: [B, H, Tq, D], or None for the queries. bias [H or 1, R], keys [H or 1, R, D] and values
    [H or 1, R, Dv] are ordered by key slot minus query slot, ascending from `-greatest`. queries
    [H or 1, R, D], the factors of the keys, are ordered by query slot minus key slot, ascending from `least`.
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
        """Return differentiable tables over the distances in the work items of a call."""
        tiles = [tile for item in items for row in item.rows for tile in row]
        least = min((tile.start + offset - tile.keys[-1][1] + 1 for tile in tiles), default=0)
        greatest = max((tile.stop - 1 + offset - tile.keys[0][0] for tile in tiles), default=0)
        # Products are rounded up to whole steps and may read entries beyond the distances of a tile.
        least, greatest = least - STEP, greatest + STEP
        tables = relative.over(least, greatest).tables
        flipped = {name.removeprefix("position_"): table.flip(1) for name, table in tables.items()}
        if "queries" in flipped:
            flipped["queries"] = tables["position_queries"]
        content = relative.content if "keys" in flipped else None
        return DistanceTables(least, greatest, content=content, **flipped)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by name."""
        return {name: tensor for name in NAMES if (tensor := getattr(self, name)) is not None}

    def with_tensors(self, tensors: Sequence[Tensor]) -> "DistanceTables":
        """Return the same tables with other tensors, in the order of `tensors`."""
        return dataclasses.replace(self, **dict(zip(self.tensors, tensors)))

    def zero_gradients(self, needed: Sequence[bool]) -> "DistanceTables":
        """Return zeros for the tensors that need gradients, in their order."""
        # zeros_like would keep the order of the axes in memory, but work items write to views of the zeros.
        zeros = [x.new_zeros(x.shape) if need else None for x, need in zip(self.tensors.values(), needed)]
        return dataclasses.replace(self, **dict(zip(self.tensors, zeros)))

    def scaled(self, scale: float, like: "DistanceTables") -> list[Tensor | None]:
        """Return the gradients in the order of the tensors of `like`, multiplied by `scale`.

        The gradients of bias and values are not scaled: `scale` does not apply to them in the forward pass.
        """
        grads = [getattr(self, name) for name in like.tensors]
        for name, grad in zip(like.tensors, grads):
            if grad is not None and name not in ("bias", "values"):
                grad.mul_(scale)
        return grads


def entries(queries: int, keys: int) -> int:
    """Return the number of distances in a product for a tile, rounded up to a multiple of `STEP`."""
    return -(-(queries + keys - 1) // STEP) * STEP


def diagonals(by_distance: Tensor, width: int) -> Tensor:
    """Return contiguous x [M, Q, entries] as a view [M, Q, width] with x[i, j - i + Q - 1] at (i, j)."""
    matrices, queries, length = by_distance.shape
    # With a row stride of length - 1 each row starts one entry earlier than the row before: the - i above.
    strides = queries * length, length - 1, 1
    return by_distance.as_strided(
        (matrices, queries, width), strides, by_distance.storage_offset() + queries - 1
    )
