"""Expected attention: keep the keys that future queries are expected to read, by the size of their values.

    s_j = softmax_j(m^T k_j scale + k_j^T C k_j scale^2 / 2) |v_j|,    m = R mean(q),  C = R cov(q) R^T

q are the queries of the prompt before positions, as samples of a Gaussian, and R is the mean rotation at the
next `future` positions. The exponent is the logarithm of E[exp(q^T k_j scale)] for such a query. Scores are
means over the query heads that share a key head. The first `sinks` tokens are always kept, and excluded from
the mean, the covariance and the softmax. Keys of new tokens are all kept. Devoto et al. 2025 (Expected
Attention), section 3; their score multiplies the values by the output projection first.

Costs D^2 products per key and query head, once; no attention weights.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.nn.cache.base import CacheCall, DroppingPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(DroppingPolicy):
    """Keep the keys of the prompt that later queries are expected to attend to.

    `future`: the number of positions of these queries. `sinks`: first tokens of a text, always kept.
    """

    future: PositiveInt = 512
    sinks: NonNegativeInt = 4

    kind: ClassVar[str] = "expected"
    paper: ClassVar[str] = "Devoto et al. 2025 (Expected Attention), section 3"
    supports_score_bias: ClassVar[bool] = False

    @classmethod
    def examples(cls) -> tuple["ExpectedAttention", ...]:
        return cls(budget=8, future=5, sinks=2), cls(budget=6, future=1, sinks=0)

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the expected share of each key in the attention of a later query, times its value's norm."""
        keys, values = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in call.pairs)
        mean, covariance = self._statistics(call)  # [B, Hkv, G, D] and [B, Hkv, G, D, D]
        rotation = self._mean_rotation(call).to(keys.dtype)[:, None, None]  # [B or 1, 1, 1, D, D]
        mean = (rotation @ mean.unsqueeze(-1)).squeeze(-1)
        covariance = rotation @ covariance @ rotation.mT
        scores = mean @ keys.mT * call.scale  # [B, Hkv, G, Tk]
        for group in range(mean.shape[2]):  # in turn, as each needs as much memory as the keys
            spread = ((keys @ covariance[:, :, group]) * keys).sum(-1)
            scores[:, :, group] += spread * (call.scale**2 / 2)
        # As in the authors' code, the sinks take no share: they would weigh the heads of a group by the rest.
        shared = self._after_sinks(call)[:, None, None]
        return scores.masked_fill(~shared, -torch.inf).softmax(-1).mean(2) * values.norm(dim=-1)

    def _after_sinks(self, call: CacheCall) -> Tensor:
        """Return which keys are tokens after the sinks of their row, [B, Tk]."""
        keys, valid = call.keys, call.context.kv_valid
        real = keys.new_ones(len(keys), keys.shape[2], dtype=torch.bool) if valid is None else valid.bool()
        return real & (real.cumsum(-1) > self.sinks)

    def always(self) -> tuple[int, int]:
        """Return the sinks."""
        return self.sinks, 0

    def _statistics(self, call: CacheCall) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance of the queries after the sinks, before positions."""
        q = call.by_key_head(call.unrotated).to(torch.promote_types(call.unrotated.dtype, torch.float32))
        weight = self._after_sinks(call).to(q.dtype)[:, None, None, :, None]
        count = weight.sum(3).clamp_min(1)
        mean = (q * weight).sum(3) / count
        centred = (q - mean.unsqueeze(3)) * weight
        return mean, centred.mT @ centred / count.unsqueeze(-1)

    def _mean_rotation(self, call: CacheCall) -> Tensor:
        """Return R, [B or 1, D, D]: the mean rotation of a query at the positions after the prompt."""
        context, width = call.context, call.queries.shape[-1]
        last = context.kv_len - 1 if context.q_pos is None else context.q_pos[..., -1]
        device = call.queries.device
        starts, row = torch.as_tensor(last, device=device).reshape(-1).unique(return_inverse=True)
        unit = torch.eye(width, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        means = []
        for start in starts.tolist():
            positions = torch.arange(start + 1, start + 1 + self.future, device=device).unsqueeze(1)
            # A batch row per position, with the unit vectors as its tokens.
            at = Context(width, width, q_pos=positions.expand(-1, width), kv_pos=positions.expand(-1, width))
            means.append(call.rotate(unit.expand(self.future, 1, width, width), at).mean((0, 1)).mT)
        return torch.stack(means)[row]
