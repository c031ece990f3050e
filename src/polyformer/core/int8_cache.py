"""A KV cache of integers with 8 bits, and a scale for each token and head.

    scale = max_d |x_d| / 127,    x_d = scale * n_d,    n_d = round(x_d / scale) in -127 .. 127

for each key and each value x of D numbers. A number is off by at most scale / 2. With D = 64 the cache needs
(64 + 4) / 256 = 0.27 of the bytes of float32. `Int8Pairs.dequantized` is the definition. Attention reads
these rounded keys and values of new tokens too, so the calls in which a text is read do not matter.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from polyformer.core.kv_cache import KeyValueCache, PairCache
from polyformer.core.sequence.context import Context
from polyformer.core.state import StateOfStates

LEVELS = 127
"""The largest integer; the least is its negative."""


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers and the scale [..., 1] of each vector of x [..., D]; no gradient reaches x.

    Scales have the type of x, and at least the precision of float32.
    """
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / LEVELS
    return (wide / scale.where(scale > 0, 1)).round().to(torch.int8), scale


class Int8Pairs(NamedTuple):
    """Integers of keys [B, Hkv, T, D] and values [B, Hkv, T, Dv], and their scales [B, Hkv, T, 1]."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor

    def dequantized(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values in a type, by default the type of the scales."""
        both = (self.keys, self.key_scale), (self.values, self.value_scale)
        keys, values = ((x.to(scale.dtype) * scale).to(dtype or scale.dtype) for x, scale in both)
        return keys, values


@dataclasses.dataclass(frozen=True)
class Int8Cache(StateOfStates, PairCache):
    """Two caches with the same slots: of the integers and of the scales."""

    integers: KeyValueCache
    scales: KeyValueCache

    @classmethod
    def empty(cls, reserve: int) -> "Int8Cache":
        """Return the cache before the first token, with space for `reserve` tokens."""
        return cls(KeyValueCache(reserve=reserve), KeyValueCache(reserve=reserve))

    @property
    def held(self) -> int:
        """The number of keys."""
        return self.integers.held

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Int8Pairs, "Int8Cache"]:
        """Return all pairs with the new keys and values [B, Hkv, T, D] last, and the longer cache."""
        (keys, key_scale), (values, value_scale) = quantized(keys), quantized(values)
        keys, values, integers = self.integers.append(keys, values)
        key_scale, value_scale, scales = self.scales.append(key_scale, value_scale)
        return Int8Pairs(keys, values, key_scale, value_scale), Int8Cache(integers, scales)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "Int8Cache"]:
        """Return all keys and values in the type of the new, each rounded to its integers."""
        pairs, cache = self.extended(keys, values)
        return *pairs.dequantized(keys.dtype), cache

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values in the type of the scales."""
        return Int8Pairs(*self.integers.pairs(), *self.scales.pairs()).dequantized()

    def gathered(self, index: Tensor) -> "Int8Cache":
        """Return a cache of the keys `index`, with the same integers."""
        return Int8Cache(self.integers.gathered(index), self.scales.gathered(index))

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the integers."""
        return self.integers.context(context, device)

    def reorder_(self, index: Tensor) -> "Int8Cache":
        """Return the batch rows `index`; both caches may write to their spare buffers."""
        return self._each(lambda tensor: tensor, lambda state: state.reorder_(index))
