"""The inputs of a call of linear attention, in one precision and with log weights for every key."""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class LinearInputs:
    """q [B, H, Tq, D], k [B, H, T, D] and v [B, H, T, Dv] of the new keys, in the precision of W.

    Args:
        weight: [B, H, T], the log weight of every key, -inf for padding.
        decay: [B, H, T], the log decay before every token; None for no decay.
        offset: the slot of the first query among these keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kernel: Kernel
    weight: Tensor
    decay: Tensor | None
    causal: bool
    offset: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: Kernel,
        context: Context,
        weight: Tensor | None = None,
        decay: Tensor | None = None,
    ) -> "LinearInputs":
        """Cast the inputs, repeat grouped keys and values [B, Hkv, T, D], and give padding no weight."""
        q, k, v = (x.to(kernel.directions.dtype) for x in (q, k, v))
        groups, new = q.shape[1] // k.shape[1], k.shape[2]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if weight is None:
            weight = k.new_zeros(k.shape[:3])
        if context.kv_valid is not None:
            real = context.kv_valid[:, -new:].unsqueeze(1)
            weight = weight.masked_fill(~real, -torch.inf)
            # Padding must not decay the sums either: a log decay of 0.
            decay = None if decay is None else decay * real
        # Without causality no key is "before" a token, so decays are undefined.
        if not context.causal:
            decay = None
        # The slots of the state come before these keys.
        offset = context.offset - (context.kv_len - new)
        return cls(q, k, v, kernel, weight, decay, context.causal, offset)

    def tokens(self, own: slice) -> "LinearInputs":
        """Return the inputs restricted to some tokens of all rows, their queries and keys."""
        tables = {name: getattr(self, name)[:, :, own] for name in ("q", "k", "v", "weight")}
        decay = None if self.decay is None else self.decay[:, :, own]
        return dataclasses.replace(self, **tables, decay=decay, offset=0)

    def part(self, row: int, queries: slice, keys: slice, offset: int) -> "LinearInputs":
        """Return the inputs restricted to some queries and keys of one row."""

        def cut(x: Tensor, tokens: slice) -> Tensor:
            return x[row : row + 1, :, tokens]

        return dataclasses.replace(
            self,
            q=cut(self.q, queries),
            k=cut(self.k, keys),
            v=cut(self.v, keys),
            weight=cut(self.weight, keys),
            decay=None if self.decay is None else cut(self.decay, keys),
            offset=offset,
        )
