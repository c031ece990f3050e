"""The scores of all pairs of a call, before any rule makes weights of them, and the mean of the values after.

    score_ij = score_mod(q_i . k_j * scale + relative terms)        allowed_ij: whether i may see j
    y_i      = sum_j weight_ij (v_j + position_values[d])

float16 and bfloat16 inputs are computed in float32, as in the fused kernels.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.functional.relative import Relative
from polyformer.attention.functional.request import Request, indices


@dataclasses.dataclass(frozen=True, eq=False)
class DensePairs:
    """All pairs of a call; time and memory are Tq x Tk.

    scores: [B, H, Tq, Tk]. allowed: bool, broadcasts to `scores`; None if every query sees every key. values:
    [B, H, Tk, Dv].
    """

    request: Request
    scores: Tensor
    allowed: Tensor | None
    values: Tensor
    relative: Relative | None

    @classmethod
    def of(cls, request: Request) -> "DensePairs":
        """Return the pairs of a request."""
        half = request.q.dtype in (torch.float16, torch.bfloat16)
        q, k, v = (x.float() if half else x for x in (request.q, request.k, request.v))
        # Grouped queries: `groups` neighbouring query heads share a key head.
        k, v = (x.repeat_interleave(request.groups, dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * request.scale  # [B, H, Tq, Tk]
        b, h, q_idx, kv_idx = indices(request)
        relative = None if request.relative is None else request.relative.to(q.dtype)
        if relative is not None:
            add = relative.score_mod(q, k, request.scale, request.context)
            scores = add(scores, b, h, q_idx, kv_idx)
        if request.score_mod is not None:
            scores = request.score_mod(scores, b, h, q_idx, kv_idx).expand(scores.shape)
        # The mask is separate, so that no score_mod can make a masked pair visible.
        allowed = None
        if request.pattern is not None:
            allowed = request.pattern.mask(request.context, b, h, q_idx, kv_idx)
        return cls(request, scores, allowed, v, relative)

    def mix(self, weights: Tensor) -> Tensor:
        """Return the values [B, H, Tq, Dv] of every query, for weights [B, H, Tq, Tk]."""
        out = weights @ self.values
        if self.relative is not None and self.relative.position_values is not None:
            out = out + self.relative.values_term(weights, self.request.context)
        return out.to(self.request.q.dtype)
