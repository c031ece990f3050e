"""The KV cache with integers of 4 bits: keys by channel in groups of tokens, values by token.

    keys      x_td = z_gd + s_gd n_td,    z_gd = min_t x_td,    s_gd = (max_t x_td - z_gd) / 15
    values    x_td = z_t + s_t n_td,      z_t = min_d x_td,     s_t = (max_d x_td - z_t) / 15

for each key head, token t of group g and channel d, with integers n in 0 .. 15, two in a byte. Keys have a
few channels with large numbers, which would take the levels of the others in a token; values have none. A
number is off by at most half of its step s.

The latest tokens, `window` to window + group - 1 of them, stay as they are. In a call queries read the new
keys and values as they are too, and groups that leave the window are rounded after it, so the calls in which
a text is read matter. Groups count slots: in a padded row they begin with padding. Liu et al. 2024 (KIVI),
section 3; they round a full window at once, and the values of a token in groups of channels.

With widths of D and groups of G tokens, a rounded token needs 1/8 + 1/G + 1/D of the bytes of float32: 0.17
with D = 64 and G = 32. Attention dequantizes all keys and values in each call. `Int4Cache.pairs` is the
definition.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.kv_cache import KeyValueCache, PairCache
from polyformer.core.sequence.context import Context
from polyformer.core.state import StateOfStates

HIGHEST = 15
"""The largest integer; the least is 0."""


def rounded_to_levels(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers of 0 to 15, and the step and the lowest number of x along `dim`, which has size 1.

    Steps have the type of x, and at least the precision of float32. No gradient reaches x.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    low, high = wide.aminmax(dim=dim, keepdim=True)
    step = (high - low) / HIGHEST
    return ((wide - low) / step.where(step > 0, 1)).round().to(torch.uint8), step, low


def packed(integers: Tensor) -> Tensor:
    """Return integers [..., D] of 4 bits as bytes of two, [..., ceil(D / 2)]."""
    integers = F.pad(integers, (0, integers.shape[-1] % 2))
    return integers[..., ::2] | (integers[..., 1::2] << 4)


def unpacked(both: Tensor, width: int) -> Tensor:
    """Return the integers [..., D] of these bytes."""
    return torch.stack((both & HIGHEST, both >> 4), -1).flatten(-2)[..., :width]


@dataclasses.dataclass(frozen=True)
class Int4Cache(StateOfStates, PairCache):
    """Caches of the latest tokens, of the integers of earlier tokens, and of their steps and lowest numbers.

    integers: bytes of keys [B, Hkv, T, D / 2] and values. key_levels: steps and lowest numbers of the keys'
    groups, [B, Hkv, T / group, D] each. value_levels: of the values, [B, Hkv, T, 1] each. widths: D of
    keys and of values, once known.
    """

    recent: KeyValueCache
    integers: KeyValueCache
    key_levels: KeyValueCache
    value_levels: KeyValueCache
    group: int
    window: int
    widths: tuple[int, int] = (0, 0)

    @classmethod
    def empty(cls, reserve: int, group: int, window: int) -> "Int4Cache":
        """Return the cache before the first token, with space for `reserve` tokens."""
        earlier = max(0, reserve - window)
        sizes = min(reserve, window + group), earlier, earlier // group, earlier
        recent, integers, key_levels, value_levels = (KeyValueCache(reserve=size) for size in sizes)
        return cls(recent, integers, key_levels, value_levels, group, window)

    @property
    def held(self) -> int:
        return self.integers.held + self.recent.held

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "Int4Cache"]:
        """Return all keys and values in the type of the new, which are not rounded, and the longer cache."""
        *latest, recent = self.recent.append(keys, values)
        cache = dataclasses.replace(self, recent=recent, widths=(keys.shape[3], values.shape[3]))
        both = cache._joined(latest)
        return *both, cache._rounded()

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values in the type of the latest."""
        keys, values = self._joined(list(self.recent.pairs()))
        return keys, values

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the keys and values that are kept as integers, [B, Hkv, T, D] each, in a type."""
        keys, values = (unpacked(x, width) for x, width in zip(self.integers.pairs(), self.widths))
        (key_step, key_low), (step, low) = self.key_levels.pairs(), self.value_levels.pairs()
        keys = keys.unflatten(2, (-1, self.group)) * key_step.unsqueeze(3) + key_low.unsqueeze(3)
        return keys.flatten(2, 3).to(dtype), (values * step + low).to(dtype)

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context as it is: no key is dropped."""
        return context

    def reorder_(self, index: Tensor) -> "Int4Cache":
        """Return the batch rows `index`; all caches may write to their spare buffers."""
        return self._each(lambda tensor: tensor, lambda state: state.reorder_(index))

    def truncated_(self, count: int) -> "Int4Cache | None":
        """Remove the last `count` tokens; None if others were rounded that would still be in the window."""
        if self.integers.held and self.recent.held - count < self.window:
            return None
        recent = self.recent.truncated_(count)
        return None if recent is None else dataclasses.replace(self, recent=recent)

    def _joined(self, latest: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the earlier keys and values, followed by the latest."""
        keys, values = latest
        if not self.integers.held:
            return keys, values
        before = self.dequantized(keys.dtype)
        return torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2)

    def _rounded(self) -> "Int4Cache":
        """Return the cache with the groups before the window as integers."""
        count = (self.recent.held - self.window) // self.group * self.group
        if count <= 0:
            return self
        keys, values = (x[:, :, :count] for x in self.recent.pairs())
        by_group = keys.unflatten(2, (-1, self.group))
        key_integers, key_step, key_low = rounded_to_levels(by_group, 3)
        integers, step, low = rounded_to_levels(values, 3)
        return dataclasses.replace(
            self,
            recent=self.recent.last(self.recent.held - count, needed=0),
            integers=self.integers.append(packed(key_integers.flatten(2, 3)), packed(integers))[2],
            key_levels=self.key_levels.append(key_step.squeeze(3), key_low.squeeze(3))[2],
            value_levels=self.value_levels.append(step, low)[2],
        )
