"""Layers' caches with a policy (`nn.cache`)."""

import dataclasses
from typing import TYPE_CHECKING

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Full
from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import KeyValueCache
from polyformer.nn.cache import CachePolicy

if TYPE_CHECKING:
    from polyformer.nn.stack.layer import LayerState
    from polyformer.nn.stack.stack import Stack


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
    policies = iter(policy.for_layers(stack.reaches.count(None)))
    return tuple(
        state if reach is not None else _with_policy(state, next(policies))
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
    if attention.config.indexer is not None:
        return "keeps keys by its own scores, but an indexer chooses keys of the whole text"
    if not isinstance(stack.mechanism, SoftmaxConfig) or attention.global_attention:
        return "needs softmax attention with one set of projections, which caches keys and values"
    if None not in stack.reaches:
        return "is for dense layers, but every layer has a window, which bounds its cache already"
    return None


def _reason_against_dropping(stack: "Stack", policy: CachePolicy) -> str | None:
    """Return why heads of a decoder cannot keep other keys than other heads; None if they can."""
    if stack.depth is not None:
        return "needs the queries of all tokens in every layer, but a depth policy leaves some out"
    known = stack.position.adds_bias and policy.basis.supports_score_bias
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
