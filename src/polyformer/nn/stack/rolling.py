"""Rolling caches: each layer's KV cache keeps only the keys that later tokens may read.

    before a call    caches drop the keys out of reach of its first query        `without_unread`
    in the call      each layer gets the context of the keys that its cache has  `layer_context`
    after it         the tokens out of reach of all layers are dropped           `stored_tokens`

Queries see all keys of their own call. Which keys are kept depends only on the call and the number of tokens
before it, so the results are the same as with a cache that drops nothing and is read in the same way.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.kv_cache import KeyValueCache, PairCache
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach, Tokens
from polyformer.nn.cache import CompressedCache
from polyformer.nn.stack.layer import LayerState


def without_unread(
    states: tuple[LayerState, ...], reaches: list[Reach | None], context: Context, before: int
) -> tuple[LayerState, ...]:
    """Return the states without the keys that the queries of `context`, and later ones, do not read.

    before: the number of slots before the call, with the slots that `context` does not store.
    """
    caches = [state.self_attention for state in states]
    # Only a cache in a buffer that grows drops keys.
    own = [reach if type(cache) is KeyValueCache else None for reach, cache in zip(reaches, caches)]
    in_slots: dict[Reach | None, Reach | None] = {
        reach: reach.in_slots(context) for reach in {*own} if reach is not None and before > reach.last
    }
    return tuple(_without_unread(state, in_slots.get(reach), before) for state, reach in zip(states, own))


def _without_unread(state: LayerState, reach: Reach | None, before: int) -> LayerState:
    cache = state.self_attention
    if reach is None or not isinstance(cache, KeyValueCache):
        return state
    kept = cache.last(reach.kept(before), reach.first, reach.last)
    return state if kept is cache else dataclasses.replace(state, self_attention=kept)


def layer_context(context: Context, state: LayerState | None, device: torch.device) -> Context:
    """Return the context of the keys that a layer's cache has, and of the new keys."""
    cache = None if state is None else state.self_attention
    return cache.context(context, device) if isinstance(cache, PairCache | CompressedCache) else context


def stored_tokens(tokens: Tokens, states: tuple[LayerState, ...]) -> Tokens:
    """Return the tokens without those that no layer's cache has."""
    caches = [state.self_attention for state in states]
    held = [cache for cache in caches if type(cache) is KeyValueCache]
    if not held or len(held) < len(caches):
        return tokens
    return tokens.kept(max(cache.first for cache in held), max(cache.held - cache.first for cache in held))


def all_columns(
    weights: list[Tensor], states: tuple[LayerState, ...], seen: int, cross: bool
) -> list[Tensor]:
    """Return recorded attention weights of a call with a column for each of the `seen` tokens: 0 if dropped.

    weights: of every layer, with `cross` of its self-attention and its cross-attention in turn.
    """
    every = list(weights)
    for place, state in zip(range(0, len(weights), 1 + cross), states):
        cache, own = state.self_attention, weights[place]
        if isinstance(cache, KeyValueCache) and own.shape[-1] == cache.held < seen:
            first, dropped = cache.first, own.new_zeros(*own.shape[:-1], seen - cache.held)
            every[place] = torch.cat([own[..., :first], dropped, own[..., first:]], -1)
    return every
