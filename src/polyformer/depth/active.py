"""The tokens of a call that go on to the next layer, and how the others leave the computation.

Active tokens of all rows stand side by side, [1, N, E], for what is computed of each token alone: norms,
queries, output projections and feed-forwards. There is no padding among them, however different the layers
are at which the rows of a batch halt. Keys and values are of all tokens.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Active:
    """Where `mask` [B, T] is True; `index` [N]: the same places in the order of a flat [B T]."""

    mask: Tensor
    index: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> "Active":
        """The places where `mask` [B, T] is True."""
        return cls(mask, mask.flatten().nonzero().squeeze(-1))

    def __len__(self) -> int:
        return len(self.index)

    def gathered(self, x: Tensor) -> Tensor:
        """Of x [B, T, E] the active tokens, [1, N, E]."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def scattered(self, y: Tensor, into: Tensor) -> Tensor:
        """`into` [B, T, E] with the active tokens y [1, N, E] in their places."""
        return into.flatten(0, 1).index_copy(0, self.index, y[0].to(into.dtype)).view(into.shape)

    def spread(self, y: Tensor) -> Tensor:
        """The active tokens y [1, N, E] in their places of [B, T, E], zeros elsewhere."""
        return self.scattered(y, y.new_zeros(*self.mask.shape, y.shape[-1]))

    def without(self, halted: Tensor) -> "Active":
        """Those of them that `halted` [N] does not name."""
        index = self.index[~halted]
        mask = torch.zeros_like(self.mask).flatten().index_fill(0, index, True)
        return Active(mask.view(self.mask.shape), index)
