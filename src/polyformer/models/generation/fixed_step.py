"""A decoding step of a fixed size, as a function of tensors that have the same form in every step.

Its state is a cache of C slots, and the slot of the step as a tensor. All tensors of such a step have the
same shapes as in the next step, so that one recorded graph serves both. Slots after the current slot are
hidden by causality, as tokens of the future.

A layer that reads all keys has a cache with a slot for each token of the text. A layer that drops keys
(`nn.stack.rolling`) has a smaller buffer, of the same size in every step, and a table of the positions in it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.core.kv_cache import Int8Cache, KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import BLOCK, ModelInputs, Reach, Tokens
from polyformer.core.state import State
from polyformer.models.outputs import ModelState
from polyformer.nn.stack import LayerState, Stack

NO_SLOT = torch.zeros(1, dtype=torch.long)


@dataclasses.dataclass(frozen=True)
class FixedCache(KeyValueCache):
    """Buffers [B, Hkv, C, D] of keys and values, read as a whole; the next tokens belong to `slots`.

    tokens: the tokens of the buffer if it does not have a slot for each token of the text.
    """

    slots: Tensor = NO_SLOT
    tokens: "FixedTokens | None" = None

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the buffer, which layers with the same tokens share."""
        tokens = self.tokens
        if tokens is None:
            return context
        return context.once(
            ("fixed tokens", id(tokens.slots)), lambda: tokens.context(context.q_len, context.causal)
        )

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "FixedCache"]:
        """Write new keys and values to their slots, and return the whole buffers."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.slots, keys)
        self.values.index_copy_(2, self.slots, values)
        return self.keys, self.values, self


@dataclasses.dataclass(frozen=True)
class FixedTokens(Tokens):
    """The tokens of all C slots; the tokens of `slots` are new."""

    slots: Tensor = NO_SLOT

    def extended(self, inputs: ModelInputs) -> Tokens:
        """Return the tokens themselves, which include the new tokens."""
        return self

    def last(self, new: int, device: torch.device) -> Tensor:
        """Return the positions of the new tokens: [B, new], or [new] if they equal the slots."""
        return self.slots if self.pos is None else self.pos[:, self.slots]

    def context(self, new: int, causal: bool, device: torch.device | None = None) -> Context:
        """Return the context of the new tokens attending to all slots up to their own."""
        return Context(
            new,
            self.length,
            causal=causal,
            q_start=self.slots[:1],  # type: ignore[arg-type]
            q_pos=None if self.pos is None else self.pos[:, self.slots],
            kv_pos=self.pos,
            q_doc=None if self.doc is None else self.doc[:, self.slots],
            kv_doc=self.doc,
            kv_valid=self.valid,
        )

    def new_valid(self, new: int) -> Tensor | None:
        """Return which new tokens are real, [B, new]; None if all are."""
        return None if self.valid is None else self.valid[:, self.slots]


def buffered(cache: State | None) -> list[KeyValueCache]:
    """Return the caches with buffers that make up a layer's cache; none for another state."""
    if isinstance(cache, Int8Cache):
        return [cache.integers, cache.scales]
    return [cache] if type(cache) is KeyValueCache else []


def joined(caches: list[KeyValueCache]) -> State:
    """Return the layer's cache that consists of the caches of `buffered`."""
    return Int8Cache(*caches) if len(caches) > 1 else caches[0]


@dataclasses.dataclass(frozen=True, eq=False)
class FixedStep:
    """A step of tokens [N, T] after `state`, with caches and tokens of a fixed size instead.

    stack: the decoder. buffers: the tokens of each layer's buffer. others: the tensors of the step except
    caches, each once. caches: the buffers of keys and of values of each layer.
    """

    tokens: Tensor
    state: ModelState
    last: int
    inputs: dict[str, Tensor]
    stack: Stack
    buffers: list[FixedTokens]
    others: list[Tensor]
    caches: list[Tensor]

    @classmethod
    def of(
        cls, tokens: Tensor, state: ModelState, last: int, inputs: dict[str, Tensor], stack: Stack
    ) -> "FixedStep | None":
        """Return the step; None if a cache has no space for it, or the state has other parts than caches."""
        if not _has_only_caches(state):
            return None
        reaches = stack.reaches
        rolled = _rolled(tokens, state, stack, reaches)
        if rolled is None:
            return None
        state, buffers, caches = rolled, [], []
        shared: dict[Reach | None, FixedTokens] = {}
        for layer, reach in zip(state.layers, reaches):
            parts = buffered(layer.self_attention)
            for cache in parts:
                if cache.keys is None or cache.values is None or not cache.can_append(tokens.shape[1]):
                    return None
                if reach is None and (cache.start or cache.length != state.tokens.length):
                    return None
                caches += cache.keys, cache.values
            if reach not in shared:
                shared[reach] = _fixed_tokens(tokens, state.tokens, parts[0], reach is not None)
            buffers.append(shared[reach])
        others = _other_tensors(state, inputs, shared.values())
        return cls(tokens, state, last, inputs, stack, buffers, others, caches)

    @property
    def filled(self) -> list[int]:
        """The number of filled slots of each of `caches`."""
        parts = (part for layer in self.state.layers for part in buffered(layer.self_attention))
        return [part.length for part in parts for _ in range(2)]

    def function(self, model: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the step as a function of `others` and `caches`, which returns logits and hidden states."""
        layers = []
        # The largest buffer has all tokens that a layer reads.
        widest = max(self.buffers, key=lambda fixed: fixed.length)
        pairs = zip(self.caches[::2], self.caches[1::2])
        for layer, fixed in zip(self.state.layers, self.buffers):
            own = None if fixed is widest else fixed
            caches: list[KeyValueCache] = [
                FixedCache(*next(pairs), fixed.length, slots=fixed.slots, tokens=own)
                for _ in buffered(layer.self_attention)
            ]
            layers.append(LayerState(joined(caches), layer.cross_attention))
        state = dataclasses.replace(self.state, tokens=widest, layers=tuple(layers))

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            new = dict(zip(map(id, [*self.others, *self.caches]), tensors))
            inputs = {name: new[id(tensor)] for name, tensor in self.inputs.items()}
            output = model(**inputs, state=state.map(lambda tensor: new[id(tensor)]))
            return model.logits_at(output, slice(-self.last, None), None), output.last_hidden_state

        return run

    def next_state(self, buffers: Sequence[Tensor]) -> ModelState:
        """Return the state after the step, which has written to `buffers`: `caches`, or copies of them."""
        layers, (rows, new) = [], self.tokens.shape
        pairs = zip(buffers[::2], buffers[1::2])
        for layer in self.state.layers:
            caches: list[KeyValueCache] = []
            for cache, (keys, values) in zip(buffered(layer.self_attention), pairs):
                assert cache.keys is not None
                if keys.data_ptr() != cache.keys.data_ptr():
                    cache = cache.moved(keys[:rows], values[:rows])
                caches.append(cache.filled(new))
            layers.append(LayerState(joined(caches), layer.cross_attention))
        tokens, states = self.state.tokens.extended(ModelInputs(self.tokens)), tuple(layers)
        return dataclasses.replace(
            self.state, tokens=self.stack.remembered_tokens(tokens, states), layers=states
        )


def _other_tensors(
    state: ModelState, inputs: dict[str, Tensor], buffers: Iterable[FixedTokens]
) -> list[Tensor]:
    """Return the tensors of a step besides the caches, each once."""
    tables = [state.source_valid, state.source_pos, state.source_spans, state.source_ids]
    for fixed in buffers:
        tables += fixed.slots, fixed.valid, fixed.pos, fixed.doc
    others = [*inputs.values(), *(table for table in tables if table is not None)]
    for layer in state.layers:
        if layer.cross_attention is not None:
            others += layer.cross_attention.tensors()
    return [*{id(x): x for x in others}.values()]


def _has_only_caches(state: ModelState) -> bool:
    """Return whether a state has no other parts than caches of keys and values."""
    old = state.tokens
    if old.merged or any(table is not None for table in (old.segment, old.marked, state.source)):
        return False
    return all(
        buffered(layer.self_attention)
        and all(other is None for other in (layer.memory, layer.store, layer.feedforward))
        for layer in state.layers
    )


def _rolled(
    tokens: Tensor, state: ModelState, stack: Stack, reaches: list[Reach | None]
) -> ModelState | None:
    """Return the state without unread keys, in buffers of a fixed size; None if a layer has no fixed size."""
    new = tokens.shape[1]
    if not any(reaches):
        return state
    context = state.tokens.extended(ModelInputs(tokens)).context(new, True, tokens.device)
    in_slots = {reach: reach.in_slots(context) for reach in reaches if reach is not None}
    if new > BLOCK or None in in_slots.values():
        return None
    layers = []
    for layer, reach in zip(stack.without_unread(state.layers, context, state.tokens.seen), reaches):
        cache, own = layer.self_attention, None if reach is None else in_slots[reach]
        if own is not None and isinstance(cache, KeyValueCache):
            size = -(-own.most // BLOCK) * BLOCK + BLOCK  # with space for a block of new tokens
            layer = dataclasses.replace(layer, self_attention=cache.with_capacity(size, new))
        layers.append(layer)
    return dataclasses.replace(state, layers=tuple(layers))


def _fixed_tokens(tokens: Tensor, old: Tokens, cache: KeyValueCache, rolls: bool) -> FixedTokens:
    """Return the tokens of all slots of a cache's buffer, with the tables of `old` continued to them.

    rolls: whether the cache drops keys, so that slots are not positions.
    """
    assert cache.keys is not None
    size, (rows, new), device = cache.keys.shape[2], tokens.shape, tokens.device
    fixed = FixedTokens(size, slots=torch.arange(cache.length, cache.length + new, device=device))
    if rolls:
        old = old.positioned(rows, device).kept(cache.first, cache.length - cache.first)
    if old.valid is None and old.pos is None and old.doc is None:
        return fixed
    every = old.extended(ModelInputs(tokens.new_zeros(rows, size - old.length)))
    return dataclasses.replace(fixed, valid=every.valid, pos=every.pos, doc=every.doc)
