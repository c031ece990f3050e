"""Bases of mechanisms with a weight for each pair of tokens.

`CachedAttention` attends to the keys of a KV cache by `attend`. `PairWeights` is the base of a mechanism of
your own: you write the weights of the pairs, this base does the rest.

    y_i = sum_j weights(score)_ij v_j        score_ij = q_i . k_j / sqrt(D), with the terms of the positions

The rest is: the mask of causality, padding, documents and the pattern, the KV cache, grouped queries, every
position scheme, dropout, recorded weights, and NaN and infinity that reach no other query.
Cost: all pairs of queries and keys, 2 Tq Tk (D + Dv) products per head, whatever the pattern is.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend_call
from polyformer.attention.functional.backends.definition import DensePairs
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.parts import (
    RotatedPart,
    attend_parts,
    attend_parts_with_lse,
    attend_with_sink,
)
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.mechanisms.base import Heads, Mechanism, MechanismConfig, PositionTerms
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod
from polyformer.attention.patterns.score_steps import chain_score_mods
from polyformer.core.config import Config
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.ops.autograd import without_autocast
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import edited_weights, record
from polyformer.core.ranges import Probability
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State


class CachedAttention(Mechanism):
    """Attention with a KV cache as state; `config` has the options `dropout` and `backend`."""

    config: Any

    def new_state(self, reserve: int) -> KeyValueCache:
        return KeyValueCache(reserve=reserve)

    def extended(self, state: State, k: Tensor, v: Tensor) -> State:
        """Return the cache with the new keys and values appended."""
        _, _, extended = appended(state, k, v)
        assert extended is not None
        return extended

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        position: PositionTerms,
        *,
        pattern: Pattern | None = None,
        mods: Sequence[ScoreMod] = (),
        scale: float | None = None,
        sink: Tensor | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Tensor:
        """Return softmax(scores) v [B, H, Tq, Dv] over all keys of the cache.

        mods: functions of the scores, after the terms of the position scheme. sink: [H], the score of a key
        without a value. mask_mod: further limits, as a function of indices (`attend`).
        """
        dropout, backend = self.config.dropout if self.training else 0.0, self.config.backend
        if position is None and sink is None:
            mod = chain_score_mods(mods) if mods else None
            call = Call(q, k, v, pattern, mask_mod, None, mod, None, context, scale, dropout, backend)
            return attend_call(call)
        parts, options = self._parts(q, k, context, position, mods)
        options |= {"mask_mod": mask_mod, "scale": scale}
        if sink is None:
            return attend_parts(parts, v, pattern, **options)
        return attend_with_sink(parts, v, pattern, sink, **options)

    def attend_with_lse(
        self, heads: Heads, context: Context, position: PositionTerms, pattern: Pattern | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return `attend`, and the log-sum-exp [B, H, Tq] of the scores of each query."""
        parts, options = self._parts(heads.q, heads.k, context, position, ())
        return attend_parts_with_lse(parts, heads.v, pattern, scale=scale, **options)

    def _parts(
        self, q: Tensor, k: Tensor, context: Context, position: PositionTerms, mods: Sequence[ScoreMod]
    ) -> tuple[Sequence[RotatedPart], dict[str, Any]]:
        """Return the sets of pairs of a call, and the options of `attend` for all of them."""
        parts = (position.parts(q, k, context) if position is not None else ()) or (RotatedPart(q, k),)
        of_position = None if position is None else position.score_mod(q, k, context)
        return parts, {
            "score_mod": chain_score_mods((of_position, *mods)),
            "relative": None if position is None else position.relative(q, k, context),
            "context": context,
            "dropout": self.config.dropout if self.training else 0.0,
            "backend": self.config.backend,
        }


MASKED_SCORE = -1e9
"""The score of a pair that is not allowed. It is finite, so that a learned factor has a gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairWeightsConfig(MechanismConfig):
    """Base of mechanisms that compute a weight for each pair of tokens, within a pattern.

    `pattern`: which keys each query attends to, in addition to the mask of causality, padding and documents;
    None for all keys.
    """

    pattern: Pattern | None = None
    dropout: Probability = 0.0  # of attention weights
    scale: float | None = None  # by default 1 / sqrt(D)

    supports_recurrence: ClassVar[bool] = True
    separate_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pattern is not None and not self.pattern.causal():
            # The config is frozen; an instance attribute overrides the class attribute.
            object.__setattr__(self, "causal", False)
            object.__setattr__(self, "instead", "a pattern that does not depend on later tokens")

    @functools.cached_property
    def reach(self) -> Reach | None:
        """Return the reach of the pattern, None for all keys."""
        return None if self.pattern is None else self.pattern.structure.reach

    def with_value(self, value: object, where: str) -> Config | None:
        """Return this config with another pattern if `value` is a pattern; the other options are kept."""
        pattern = Pattern.parse(value)
        if pattern is None:
            return super().with_value(value, where)
        return dataclasses.replace(self, pattern=pattern)

    def for_layer(self, layer: int) -> Self:
        """Return the config with the pattern of layer `layer`."""
        if self.pattern is None:
            return self
        return dataclasses.replace(self, pattern=self.pattern.layer_pattern(layer))

    def within(self, pattern: Pattern) -> Self:
        """Return the config with the intersection of its pattern and `pattern`."""
        own = pattern if self.pattern is None else self.pattern & pattern
        return dataclasses.replace(self, pattern=own)

    def cross(self, pattern: Pattern | None = None) -> Self:
        """Return the config with a pattern between two sequences, and the same options of the scores."""
        return dataclasses.replace(self, pattern=pattern)


class PairWeights(CachedAttention):
    """Attention with weights of your own; a subclass defines `weights`, and its config derives from
    `PairWeightsConfig`."""

    def __init__(self, config: PairWeightsConfig):
        super().__init__()
        self.config = config

    def weights(self, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return the weights [B, H, Tq, Tk] of the values.

        scores: [B, H, Tq, Tk], at least in float32, `MASKED_SCORE` where a pair is not allowed. allowed:
        bool, of the same shape; the weights of other pairs are then set to 0. The number of keys of a query
        is `allowed.sum(-1, keepdim=True)`: 0 for padding, and never the length of the row. The weights of a
        query must not depend on other queries, because a cache computes them one after another.
        """
        raise NotImplementedError

    def weights_of_call(self, q: Tensor, context: Context, scores: Tensor, allowed: Tensor) -> Tensor:
        """Return `weights`; a subclass overrides this if its equation reads the queries q [B, H, Tq, D]."""
        return self.weights(scores, allowed)

    def reach(self) -> Reach | None:
        """Return the reach of the pattern."""
        return self.config.reach

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return the weighted values over all keys of the cache, and the next cache."""
        k, v, state = appended(state, k, v)
        config = self.config
        terms: dict[str, Any] = {}
        if position is not None:
            terms["score_mod"] = position.score_mod(q, k, context)
            terms["relative"] = position.relative(q, k, context)
        call = Call(q, k, v, config.pattern, context=context, scale=config.scale, **terms)
        with without_autocast(q):
            pairs = DensePairs.of(prepare(call))
            return pairs.mix(self._masked_weights(pairs)), state

    def _masked_weights(self, pairs: DensePairs) -> Tensor:
        """Return the weights with zeros where a pair is not allowed, after interventions and dropout."""
        scores, of_call = pairs.scores, (pairs.request.q, pairs.request.context)
        if pairs.allowed is None:
            weights = self.weights_of_call(*of_call, scores, torch.ones_like(scores, dtype=torch.bool))
        else:
            allowed = pairs.allowed.expand(scores.shape)
            weights = self.weights_of_call(*of_call, scores.masked_fill(~allowed, MASKED_SCORE), allowed)
            weights = weights.masked_fill(~allowed, 0.0)
        weights = edited_weights.edit(weights)
        record(weights)
        return dropout(weights, self.config.dropout if self.training else 0.0)
