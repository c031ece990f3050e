"""Rows that join and leave a batch: the states of texts of different lengths as one state.

A state has a slot for each token. Shorter texts are padded on the left, so that the next token of every row
has the same slot, and positions are kept in a table:

    row a    _ _ _ a0 a1        valid 0 0 0 1 1     pos 0 0 0 0 1
    row b    b0 b1 b2 b3 b4     valid 1 1 1 1 1     pos 0 1 2 3 4

Padding that no row needs any longer is cut off when rows leave. Joining copies all caches once, O(rows x
slots); it happens once per text, a step once per token.

A cache may have integers of 8 bits (`int8`); their scales are joined in the same way. States with other
parts than caches of all tokens cannot be padded afterwards: linear recurrences, memories, windows that drop
keys, and the other cache policies.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.core.kv_cache import Int8Cache, KeyValueCache, PairCache
from polyformer.core.sequence.tokens import Tokens
from polyformer.models.outputs import ModelState
from polyformer.nn.cache import CachePolicy
from polyformer.nn.stack import LayerState

SPARE = 64
"""Slots of a joined state for the next tokens; beyond them its caches grow by doubling."""


def can_join(model: Any, cache: CachePolicy | None = None) -> bool:
    """Return whether the states of a decoder are caches of all tokens, so that rows can join a batch.

    cache: the policy of its KV cache.
    """
    stack = model.decoder
    if stack is None or model.encoder is not None or not stack.mechanism.supports_kv_cache:
        return False
    if stack.memory is not None or stack.depth is not None or any(stack.reaches):
        return False
    return all(map(_is_whole_cache, model.new_state(0, cache).layers))


def _is_whole_cache(layer: LayerState) -> bool:
    own = layer.self_attention
    return type(own) in (KeyValueCache, Int8Cache) and layer == LayerState(own)


def joined(states: Sequence[ModelState]) -> ModelState:
    """Return the rows of all states, in their order, as the rows of one state.

    The states are of models for which `can_join` holds, after one token or more.
    """
    length = max(state.tokens.length for state in states)
    valid = torch.cat([padded(_valid(state), length) for state in states])
    positions = torch.cat([padded(_positions(state), length) for state in states])
    layers = [_rebuilt(caches, length) for caches in zip(*map(_caches, states))]
    return dataclasses.replace(states[0], tokens=_tokens(valid, positions), layers=tuple(layers))


def selected(state: ModelState, rows: Sequence[int]) -> ModelState:
    """Return only these rows of a state, without the slots that are padding in all of them."""
    index = torch.tensor(rows, device=_rows(state)[1])
    valid = _valid(state)[index]
    first = int(valid.any(0).int().argmax())
    length = state.tokens.length - first
    layers = [_rebuilt([cache], length, lambda x: x[index][:, :, first:]) for cache in _caches(state)]
    tokens = _tokens(valid[:, first:], _positions(state)[index][:, first:])
    return dataclasses.replace(state, tokens=tokens, layers=tuple(layers))


def beginning(state: ModelState, length: int) -> ModelState:
    """Return the first `length` tokens of a state of one row, in separate buffers."""
    layers = [_rebuilt([cache], length, lambda x: x[:, :, :length]) for cache in _caches(state)]
    return dataclasses.replace(state, tokens=Tokens(length), layers=tuple(layers))


def padded(table: Tensor, length: int) -> Tensor:
    """Return a table [B, T] with zeros before its columns, `length` in all."""
    return torch.nn.functional.pad(table, (length - table.shape[1], 0))


def _caches(state: ModelState) -> list[PairCache]:
    """Return the cache of each layer."""
    caches = [layer.self_attention for layer in state.layers]
    assert all(isinstance(cache, PairCache) for cache in caches)
    return caches  # type: ignore[return-value]


def _rebuilt(
    caches: Sequence[PairCache], length: int, part: Callable[[Tensor], Tensor] = lambda x: x
) -> LayerState:
    """Return the state of a layer with the rows of all caches, and of each tensor only a part."""
    first = caches[0]
    if isinstance(first, Int8Cache):
        pairs = [[getattr(cache, name) for cache in caches] for name in ("integers", "scales")]
        return LayerState(Int8Cache(*(_filled(each, length, part) for each in pairs)))
    return LayerState(_filled(caches, length, part))


def _filled(caches: Sequence[Any], length: int, part: Callable[[Tensor], Tensor]) -> KeyValueCache:
    keys, values = (_stacked([part(cache.pairs()[i]) for cache in caches], length) for i in range(2))
    return KeyValueCache(keys, values, length, [length])


def _rows(state: ModelState) -> tuple[int, torch.device]:
    cache = _caches(state)[0]
    keys = (cache.integers if isinstance(cache, Int8Cache) else cache).pairs()[0]
    return len(keys), keys.device


def _valid(state: ModelState) -> Tensor:
    """Return which slots are tokens, [B, T] bool."""
    if state.tokens.valid is not None:
        return state.tokens.valid
    rows, device = _rows(state)
    return torch.ones(rows, state.tokens.length, dtype=torch.bool, device=device)


def _positions(state: ModelState) -> Tensor:
    """Return the position of each slot, [B, T]."""
    if state.tokens.pos is not None:
        return state.tokens.pos
    rows, device = _rows(state)
    return torch.arange(state.tokens.length, device=device).expand(rows, -1)


def _tokens(valid: Tensor, positions: Tensor) -> Tokens:
    """Return the tokens with these tables; without any if no slot is padding, for the faster kernels."""
    if bool(valid.all()):
        return Tokens(valid.shape[1])
    return Tokens(valid.shape[1], valid=valid, pos=positions)


def _stacked(parts: Sequence[Tensor], length: int) -> Tensor:
    """Return buffers [B, H, length + SPARE, D]; their slots up to `length` end with the parts."""
    like = parts[0]
    buffer = like.new_zeros(sum(map(len, parts)), like.shape[1], length + SPARE, like.shape[3])
    row = 0
    for part in parts:
        buffer[row : row + len(part), :, length - part.shape[2] : length] = part
        row += len(part)
    return buffer
