"""The KV cache: past keys and values in a buffer that grows by doubling, so that a token costs O(1).

A cache may have integers of 8 bits, and a scale for each token and head:

    scale = max_d |x_d| / 127,    x_d = scale * n_d,    n_d = round(x_d / scale) in -127 .. 127

for each key and each value x of D numbers. A number is off by at most scale / 2. With D = 64 the cache needs
(64 + 4) / 256 = 0.27 of the bytes of float32. `Int8Pairs.dequantized` is the definition. Attention reads
these rounded keys and values of new tokens too, so the calls in which a text is read do not matter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from polyformer.core.ranges import RESERVED
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates

FIRST_CAPACITY = 64


class PairCache(State):
    """Base of the caches of keys and values of a text."""

    @property
    def held(self) -> int:
        """The number of keys."""
        raise NotImplementedError

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Self]:
        """Return all keys and values with the new ones [B, Hkv, T, D] last, and the longer cache."""
        raise NotImplementedError

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return all keys and values, [B, Hkv, held, D] each."""
        raise NotImplementedError

    def gathered(self, index: Tensor) -> Self:
        """Return a cache of the keys `index` [B, Hkv, K] of each head; none can be removed."""
        raise NotImplementedError

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the keys that this cache has, in a call that appends the keys of its queries.

        context: of all keys of the call, with the keys that this cache has dropped.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class KeyValueCache(PairCache):
    """Keys [B, Hkv, capacity, D] and values [B, Hkv, capacity, Dv], filled from `start` to `length`.

    A cache is a value: `append` returns the longer cache and the shorter cache stays valid. Both share one
    buffer; `high_water` (its number of filled slots) shows when a second continuation must copy it.

    The filled slots are the last tokens of a text or, after `last`, its first `first` tokens and its last
    tokens.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0
    high_water: list[int] = dataclasses.field(default_factory=lambda: [0])
    reserve: int = 0  # slots to allocate at once, up to RESERVED, if the final length is known in advance
    spare: list[Tensor] = dataclasses.field(default_factory=list)  # buffers that `reorder_` may write to
    start: int = 0  # slots before `start` were dropped by `last`
    first: int = 0  # the filled slots that come before the dropped tokens
    needed: int | None = None  # the last tokens that must remain after `truncated_`, if others were dropped

    @property
    def held(self) -> int:
        return self.length - self.start

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "KeyValueCache"]:
        """Write the new keys and values to the buffer, or to a larger buffer."""
        if torch.is_grad_enabled():
            return self._append_in_graph(keys, values)
        new = keys.shape[2]
        cache = self if self.can_append(new) else self._with_capacity(keys, values)
        own, start = (cache.keys, cache.values), cache.start
        assert own[0] is not None
        assert own[1] is not None
        length = cache.length + new
        own[0].narrow(2, cache.length, new).copy_(keys)
        own[1].narrow(2, cache.length, new).copy_(values)
        cache.high_water[0] = length
        filled = length - start
        return own[0].narrow(2, start, filled), own[1].narrow(2, start, filled), cache._with_length(length)

    def _append_in_graph(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "KeyValueCache"]:
        """Concatenate instead of writing to the buffer, which autograd may have saved."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self._filled(self.keys), keys], 2)
            values = torch.cat([self._filled(self.values), values], 2)
        length = keys.shape[2]
        kept = {"first": self.first, "needed": self.needed}
        return keys, values, KeyValueCache(keys, values, length, [length], self.reserve, **kept)

    def _with_capacity(self, keys: Tensor, values: Tensor) -> "KeyValueCache":
        """Return a copy in a new buffer, for a cache that is full or whose next slots another cache uses."""
        length = self.held + keys.shape[2]
        capacity = max(2 * length if self.length else length, min(self.reserve, RESERVED), FIRST_CAPACITY)
        buffers = [x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (keys, values)]
        return dataclasses.replace(self._copied_to(buffers), spare=self.spare)

    def _copied_to(self, buffers: Sequence[Tensor]) -> Self:
        """Return the cache with these buffers, which get the filled slots as their first slots."""
        for buffer, old in zip(buffers, (self.keys, self.values)):
            if old is not None:
                buffer[:, :, : self.held] = self._filled(old).detach()
        return self._with(*buffers)

    def _with(self, keys: Tensor, values: Tensor) -> Self:
        """Return the cache with new buffers that begin with the filled slots."""
        length = self.held
        return dataclasses.replace(
            self, keys=keys, values=values, length=length, high_water=[length], start=0, spare=[]
        )

    def can_append(self, new: int) -> bool:
        """Return whether the buffer has `new` slots after the filled slots that no other cache uses."""
        if self.keys is None or self.high_water[0] != self.length or self.keys.requires_grad:
            return False
        return self.length + new <= self.keys.shape[2]

    def filled(self, new: int) -> "KeyValueCache":
        """Return the cache with `new` more slots, which the caller has filled in the buffer."""
        self.high_water[0] = self.length + new
        return self._with_length(self.length + new)

    def _with_length(self, length: int) -> Self:
        """Return a cache of the same buffer that is filled up to `length`."""
        other = object.__new__(type(self))  # once per layer and token: `dataclasses.replace` takes longer
        other.__dict__.update(self.__dict__, length=length)
        return other

    def moved(self, keys: Tensor, values: Tensor) -> "KeyValueCache":
        """Return the cache with other buffers that have the same filled slots.

        `reorder_` may write to the old buffers, if it could write to the spare buffers.
        """
        spare = [self.keys, self.values] if self.spare and self.keys is not None else []
        return dataclasses.replace(self, keys=keys, values=values, high_water=[self.length], spare=spare)

    def last(self, count: int, first: int = 0, needed: int | None = None) -> "KeyValueCache":
        """Return the cache of only the last `count` tokens, and of the first `first` of the text.

        A full buffer frees the others; with `first`, both parts are copied to a new buffer. needed: how many
        of the last tokens must remain after `truncated_`; by default none can be removed.
        """
        first = min(first, self.first) if self.first else first
        if count >= self.held - (self.first or first):
            return self
        needed = count + 1 if needed is None else needed
        if not first or self.keys is None or self.values is None:
            return dataclasses.replace(self, start=self.length - count, first=0, needed=needed)
        start, length = self.held - count, first + count
        parts = [self._filled(buffer) for buffer in (self.keys, self.values)]
        keys, values = (torch.cat([x[:, :, :first], x[:, :, start:]], 2) for x in parts)
        return KeyValueCache(keys, values, length, [length], self.reserve, first=first, needed=needed)

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context without the dropped keys."""
        if self.length - self.start >= context.kv_len - context.q_len:
            return context
        return context.kept(self.first, self.held - self.first + context.q_len, device)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the filled slots of both buffers."""
        assert self.keys is not None
        assert self.values is not None
        return self._filled(self.keys), self._filled(self.values)

    def gathered(self, index: Tensor) -> "KeyValueCache":
        """Return a cache of the keys `index`, with space for as many more tokens as this cache reserved."""
        keys, values = (x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in self.pairs())
        size = index.shape[-1]
        reserve = max(0, self.reserve - self.held + size)
        return KeyValueCache(keys, values, size, [size], reserve, needed=size)

    def with_capacity(self, capacity: int, new: int) -> "KeyValueCache":
        """Return a cache with a buffer of this capacity that is filled from slot 0 on.

        The buffer is the same if it has space for `new` slots.
        """
        if self.keys is None or self.values is None:
            return self
        if self.keys.shape[2] == capacity and not self.start and self.can_append(new):
            return self
        buffers = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (self.keys, self.values)]
        return self._copied_to(buffers)

    def _filled(self, buffer: Tensor, length: int | None = None) -> Tensor:
        """Return the filled slots of a buffer, up to `length`, by default the cache's length."""
        return buffer.narrow(2, self.start, (self.length if length is None else length) - self.start)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply `function` to every tensor; a copy in a new buffer gets a new high-water mark."""
        mapped = super().map(function)
        same = (
            self.keys is not None
            and mapped.keys is not None
            and mapped.keys.data_ptr() == self.keys.data_ptr()
        )
        return mapped if same else dataclasses.replace(mapped, high_water=[self.length])

    def reorder(self, index: Tensor) -> Self:
        """Return the batch rows `index`; copies only the filled slots and keeps the capacity."""
        if self.keys is None or self.values is None:
            return self
        keys, values = (self._rows(buffer, index) for buffer in (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values, high_water=[self.length])

    def reorder_(self, index: Tensor) -> Self:
        """Return the batch rows `index`, copied from one buffer to another, and back the next time."""
        if self.keys is None or self.values is None or torch.is_grad_enabled():
            return self.reorder(index)
        old, spare = [self.keys, self.values], self.spare
        if not spare or any(a.shape != b.shape or len(a) != len(index) for a, b in zip(old, spare)):
            spare = [buffer.new_empty(len(index), *buffer.shape[1:]) for buffer in old]
        for buffer, other in zip(old, spare):
            torch.index_select(self._filled(buffer), 0, index, out=self._filled(other))
        return dataclasses.replace(self, keys=spare[0], values=spare[1], high_water=[self.length], spare=old)

    def compact(self) -> Self:
        """Return a cache with the filled slots only."""
        if self.keys is None or self.values is None:
            return dataclasses.replace(self, spare=[])
        return self._with(*self.pairs())

    def truncated_(self, count: int) -> Self | None:
        """Remove the last `count` tokens; the next tokens use their slots in the same buffer.

        None if a dropped token would be needed again.
        """
        if self.needed is not None and self.held - self.first - count < self.needed:
            return None
        length = self.length - count
        if self.high_water[0] == self.length:
            self.high_water[0] = length
        return dataclasses.replace(self, length=length)

    def _rows(self, buffer: Tensor, index: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return buffer.narrow(2, 0, self.length).index_select(0, index)
        copy = buffer.new_empty(len(index), *buffer.shape[1:])
        self._filled(copy).copy_(self._filled(buffer)[index])
        return copy


def appended(state: State | None, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, State | None]:
    """Return all keys and values, the new ones last, and the next state of a mechanism with a KV cache."""
    if state is None:
        return keys, values, None
    assert isinstance(state, PairCache)
    return state.append(keys, values)


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
