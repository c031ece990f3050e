"""The caches of the layers of a stack: without the keys that no token reads again, or with a policy.

A rolling cache keeps only the keys that later tokens may read:

    before a call    caches drop the keys out of reach of its first query        `without_unread`
    in the call      each layer gets the context of the keys that its cache has  `layer_context`
    after it         the tokens out of reach of all layers are dropped           `stored_tokens`

Queries see all keys of their own call. Which keys are kept depends only on the call and the number of tokens
before it, so the results are the same as with a cache that drops nothing and is read in the same way.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Full
from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import KeyValueCache, PairCache
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach
from polyformer.core.sequence.tokens import Tokens
from polyformer.nn.cache import CachePolicy, CompressedCache
from polyformer.nn.stack.layer import LayerState

if TYPE_CHECKING:
    from polyformer.nn.stack.stack import Stack


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


def with_policy(
    stack: "Stack", states: "tuple[LayerState, ...]", policy: CachePolicy | str | None
) -> "tuple[LayerState, ...]":
    """Return a decoder's states before the first token, with caches that follow the policy; None for none.

    Layers with a window keep their own keys (`rolling`). Raises `InputError` for a decoder without a layer
    that the policy is for.
    """
    if policy is None:
        return states
    policy = CachePolicy.from_dict(policy, "cache")
    reason = _reason(stack) or (_reason_against_dropping(stack, policy) if policy.drops_keys else None)
    if reason is not None:
        raise InputError(f"cache: {quote(policy.kind)} {reason}; leave the cache out")
    return tuple(
        state if reach is not None else _with_policy(state, policy)
        for reach, state in zip(stack.reaches, states)
    )


def _with_policy(state: "LayerState", policy: CachePolicy) -> "LayerState":
    cache = state.self_attention
    assert isinstance(cache, KeyValueCache)
    return dataclasses.replace(state, self_attention=policy.new_state(cache.reserve))


def _reason(stack: "Stack") -> str | None:
    """Return why no policy works for a decoder; None if some do."""
    if stack.memory is not None:
        return "keeps keys of the whole text, but a memory keeps only the last"
    attention = stack.sequence[0].attention
    if attention.config.latent is not None:
        return "is for keys and values of heads, but latent attention caches one latent for all heads"
    if not isinstance(stack.mechanism, SoftmaxConfig) or attention.global_attention:
        return "needs softmax attention with one set of projections, which caches keys and values"
    if None not in stack.reaches:
        return "is for dense layers, but every layer has a window, which bounds its cache already"
    return None


def _reason_against_dropping(stack: "Stack", policy: CachePolicy) -> str | None:
    """Return why heads of a decoder cannot keep other keys than other heads; None if they can."""
    if stack.depth is not None:
        return "needs the queries of all tokens in every layer, but a depth policy leaves some out"
    known = stack.position.adds_bias and policy.supports_score_bias
    if stack.position.rotates_parts or (stack.position.adds_terms and not known):
        return (
            "keeps other keys in each head, but this position scheme reads their distances; use rotary, "
            "learned or no positions of a fixed extension, or ALiBi or T5 biases with 'snapkv' or 'h2o'"
        )
    assert isinstance(stack.mechanism, SoftmaxConfig)
    if stack.mechanism.changes_scores:
        return "weighs keys by their scores, which a soft_cap or a sink changes"
    dense = None, Full(), Causal()
    own = [stack.mechanism.for_layer(number).pattern for number in stack.layer_range]
    patterns = [pattern for pattern, reach in zip(own, stack.reaches) if reach is None]
    if any(pattern not in dense for pattern in patterns):
        return "keeps other keys in each head, but a pattern reads their places; use dense layers or windows"
    return None
