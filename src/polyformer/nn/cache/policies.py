"""The cache policies: all keys as integers, or those keys of each head with the highest scores s_j.

Int8: keep all keys and values, as integers of 8 bits with a scale for each token and head.

    scale = max_d |x_d| / 127,    x_d = scale * round(x_d / scale)

Attention is the attention of an ordinary cache over these rounded keys and values, also for the tokens of the
prompt. Token-wise quantization of Yao et al. 2022 (ZeroQuant), section 4.1, for keys after positions.

Costs (D + 4) / 4 D of the bytes of float32: 0.27 with D = 64. A single query on a CPU reads the integers;
other calls dequantize all keys first.

Int4: keep all keys and values as integers of 4 bits: keys by channel in groups of tokens, values by token.

    x = z + s n,    n in 0 .. 15,    s = (max - min) / 15,    z = min

The latest `window` tokens stay as they are; `core.int4_cache` has the details. Liu et al. 2024 (KIVI),
section 3. Costs 1/8 + 1/G + 1/D of the bytes of float32, and dequantizes all keys in each call.

H2O: keep the keys with the largest sum of attention weights so far, and the latest keys.

    s_j = sum over all queries i so far of softmax(q_i k^T scale)_j

Each key head keeps its last budget - budget // 2 keys and, of the others, the budget // 2 with the highest
s_j ("heavy hitters"), summed over the query heads that share it. Keys are dropped after the prompt and after
every later call; a dropped key is not read again. Zhang et al. 2023 (H2O), section 4.

Costs a second computation of all attention weights: of the prompt in parts, later of one query per step.
Tokens that are read in a single call see each other's keys, so the split of a text into calls matters.

SnapKV: keep the keys that the end of the prompt attends to.

    s_j = pool(sum over the last `window` queries i of softmax(q_i k^T scale)_j)

Each key head keeps the last `window` keys, and of the others the `budget - window` keys with the highest s_j,
summed over the query heads that share it. The pooling over `kernel` neighbours keeps the words around a key
too: the prompt attends to the first digit of a number, and only the answer to the others, so half a kernel
must cover what is copied. Keys of new tokens are all kept. Li et al. 2024 (SnapKV), section 4.

Costs `window` rows of attention weights per layer, once.

Expected attention: keep the keys that future queries are expected to read, by the size of their values.

    s_j = softmax_j(m^T k_j scale + k_j^T C k_j scale^2 / 2) |v_j|,    m = R mean(q),  C = R cov(q) R^T

q are the queries of the prompt before positions, as samples of a Gaussian, and R is the mean rotation at the
next `future` positions. The exponent is the logarithm of E[exp(q^T k_j scale)] for such a query. Scores are
means over the query heads that share a key head. The first `sinks` tokens are always kept, and excluded from
the mean, the covariance and the softmax. Keys of new tokens are all kept. Devoto et al. 2025 (Expected
Attention), section 3; their score multiplies the values by the output projection first.

Costs D^2 products per key and query head, once; no attention weights.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.int4_cache import Int4Cache
from polyformer.core.kv_cache import Int8Cache
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.nn.cache.base import CachePolicy, Count, DroppingPolicy
from polyformer.nn.cache.call import CacheCall, among_last


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Policy(CachePolicy):
    """Keep all keys and values as 8-bit integers, with a scale for each token and head."""

    kind: ClassVar[str] = "int8"
    paper: ClassVar[str] = "Yao et al. 2022 (ZeroQuant), section 4.1"
    has_fixed_steps: ClassVar[bool] = True

    def new_state(self, reserve: int) -> Int8Cache:
        return Int8Cache.empty(reserve)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Policy(CachePolicy):
    """Keep all keys and values as 4-bit integers, but for the latest tokens.

    `group`: the number of tokens whose keys share a step in each channel. `window`: the latest tokens, which
    stay as they are.
    """

    group: PositiveInt = 32
    window: NonNegativeInt = 128

    kind: ClassVar[str] = "int4"
    paper: ClassVar[str] = "Liu et al. 2024 (KIVI), section 3"
    supports_drafts: ClassVar[bool] = False

    @classmethod
    def examples(cls) -> tuple["Int4Policy", ...]:
        return cls(group=4, window=6), cls(group=3, window=0)

    def new_state(self, reserve: int) -> Int4Cache:
        return Int4Cache.empty(reserve, self.group, self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(DroppingPolicy):
    """Keep the keys with the most attention so far, and the latest keys, half of the budget each."""

    kind: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "Zhang et al. 2023 (H2O), section 4"
    after_every_call: ClassVar[bool] = True
    supports_drafts: ClassVar[bool] = False

    @classmethod
    def examples(cls) -> tuple["H2O", ...]:
        return cls(budget=7), cls(ratio=0.4)

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the sums of all weights that the keys have received."""
        weights = call.weights_received()
        return weights if past is None else weights + F.pad(past, (0, weights.shape[-1] - past.shape[-1]))

    def always(self, budget: Count) -> tuple[int, Count]:
        """Return the latest half."""
        return 0, budget - budget // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(DroppingPolicy):
    """Keep the keys of the prompt that its last tokens attend to.

    `window`: the number of these tokens. `kernel`, `pooling`: of the weights along the text; an odd number.
    """

    window: PositiveInt = 32
    kernel: Annotated[int, Ge(1)] = 15
    pooling: Literal["mean", "max"] = "mean"

    kind: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "Li et al. 2024 (SnapKV), section 4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise InputError(f"kernel: expected an odd number, got {self.kernel}")

    @classmethod
    def examples(cls) -> tuple["SnapKV", ...]:
        return (
            cls(budget=8, window=3, kernel=3),
            cls(budget=8, window=2, kernel=5, pooling="max"),
            cls(ratio=0.4, window=2, kernel=3),
        )

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the pooled weights from the last queries of the prompt."""
        weights = call.weights_received(self.window)
        # The weights of the window itself do not enter its neighbours' mean.
        weights = weights.masked_fill(self._window(call), 0.0)
        pool = F.avg_pool1d if self.pooling == "mean" else F.max_pool1d
        return pool(weights, self.kernel, stride=1, padding=self.kernel // 2)

    def _window(self, call: CacheCall) -> Tensor:
        """Return which keys are of the last `window` tokens of their row, [B or 1, 1, Tk]."""
        valid, keys = call.context.kv_valid, call.keys
        if valid is not None:
            return among_last(valid, self.window).unsqueeze(1)
        slots = torch.arange(keys.shape[2], device=keys.device)
        return (slots >= len(slots) - self.window).view(1, 1, -1)

    def always(self, budget: Count) -> tuple[int, Count]:
        """Return the window."""
        return 0, self.window


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
        return (
            cls(budget=8, future=5, sinks=2),
            cls(budget=6, future=1, sinks=0),
            cls(ratio=0.4, future=5, sinks=1),
        )

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

    def always(self, budget: Count) -> tuple[int, Count]:
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
