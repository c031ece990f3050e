"""The base of mechanisms that attend to the keys of a KV cache by `attend`."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from polyformer.attention.functional.attend import attend_call
from polyformer.attention.functional.parts import RotatedPart, attend_parts
from polyformer.attention.functional.request import Call
from polyformer.attention.functional.score_options import attend_with_sink
from polyformer.attention.mechanisms.base import Mechanism, PositionTerms
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.score_steps import chain_score_mods
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.sequence.context import Context
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
    ) -> Tensor:
        """Return softmax(scores) v [B, H, Tq, Dv] over all keys of the cache.

        mods: functions of the scores, after the terms of the position scheme. sink: [H], the score of a key
        without a value.
        """
        dropout, backend = self.config.dropout if self.training else 0.0, self.config.backend
        if position is None and sink is None:
            mod = chain_score_mods(mods) if mods else None
            call = Call(q, k, v, pattern, None, None, mod, None, context, scale, dropout, backend)
            return attend_call(call)
        parts = (position.parts(q, k, context) if position is not None else ()) or (RotatedPart(q, k),)
        of_position = None if position is None else position.score_mod(q, k, context)
        options: dict[str, Any] = {
            "score_mod": chain_score_mods((of_position, *mods)),
            "relative": None if position is None else position.relative(q, k, context),
            "context": context,
            "scale": scale,
            "dropout": dropout,
            "backend": backend,
        }
        if sink is None:
            return attend_parts(parts, v, pattern, **options)
        return attend_with_sink(parts, v, pattern, sink, **options)
