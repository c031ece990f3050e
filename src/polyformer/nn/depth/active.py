"""The active tokens of a call, which continue to the next layer, and the removal of halted tokens.

Active tokens of all rows are concatenated, [1, N, E], for tokenwise computations: norms, queries, output
projections and feed-forwards. There is no padding among them, even if the rows of a batch halt at different
layers. Keys and values are of all tokens.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Active:
    """The places where `mask` [B, T] is True; `index` [N]: the same places in the flattened [B T].

    On the meta device, which traces only shapes, all tokens are active and none halts.
    """

    mask: Tensor
    index: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Active":
        """Return the places where `mask` [B, T] is True."""
        if mask.is_meta:
            return cls(mask, torch.arange(mask.numel(), device=mask.device))
        return cls(mask, mask.flatten().nonzero().squeeze(-1))

    def __len__(self) -> int:
        return len(self.index)

    def gather(self, x: Tensor) -> Tensor:
        """Return the active tokens [1, N, E] of x [B, T, E]."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def scatter(self, y: Tensor, into: Tensor) -> Tensor:
        """Return `into` [B, T, E] with the active tokens y [1, N, E] in their places."""
        return into.flatten(0, 1).index_copy(0, self.index, y[0].to(into.dtype)).view(into.shape)

    def scatter_to_zeros(self, y: Tensor) -> Tensor:
        """Return the active tokens y [1, N, E] in their places of [B, T, E], with zeros elsewhere."""
        return self.scatter(y, y.new_zeros(*self.mask.shape, y.shape[-1]))

    def without(self, halted: Tensor) -> "Active":
        """Return the active tokens without the tokens where `halted` [N] is True."""
        if self.mask.is_meta:
            return self
        index = self.index[~halted]
        mask = torch.zeros_like(self.mask).flatten().index_fill(0, index, True)
        return Active(mask.view(self.mask.shape), index)
