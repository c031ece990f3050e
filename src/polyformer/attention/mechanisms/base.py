"""The interface between attention mechanisms and the model: projected heads in, mixed heads out."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol

from torch import Tensor, nn

from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.expression import first_name
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

Form = Literal["auto", "definition"]
"""The field `backend` of a mechanism with a custom fast form: the fast form, or the plain equation."""

ONCE_PLAIN = "lsh", "memory_compressed", "performer", "rfa", "routing", "sinkhorn", "sort_cut"
"""Members with configs that were saved with an option `plain`: true is now `backend="definition"`."""


class ScoreTerms(Protocol):
    """The effect of a position scheme on scores, computed when all keys k of the queries q are known."""

    @property
    def farthest(self) -> int | None:
        """The distance beyond which all distances are treated alike, on both sides; None for no limit."""

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """Return a function of every score, its query and key; None if the scheme has none."""

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the terms of scores and values by distance; None if the scheme has none."""


ABILITIES = {
    "causal": "run in a decoder: it sees later tokens",
    "packs": "keep documents packed in one row apart",
    "caches": "go on from a state",
    "relates": "take positions that change scores",
    "remembers": "attend to a memory of earlier segments",
    "spreads": "take a sequence that is spread over processes",
}
"""Abilities that a mechanism may lack, by the class attribute that declares them."""

WAYS_OUT = {
    "packs": "give each document rows of its own (--task.packed false, where the task has it)",
    "relates": "take a position that changes none, such as 'learned', 'sinusoidal', 'rope' or 'none'",
}
"""Alternatives to an ability, other than another mechanism."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig(Config):
    """Family of mechanisms: `build(num_heads, head_size)` makes the module.

    Class attributes declare the abilities of a member (`ABILITIES`); errors name the alternative `instead`:
    `causal`; `packs`; `caches`; `relates`: accepts the score terms of a position scheme; `remembers`: accepts
    more keys than queries, with the keys of a memory first, and has a KV cache as state; `spreads`: accepts
    one process's share of the tokens of a sequence. `reasons`: the reason why a member lacks an ability, if
    its equation does not show it.

    `eager`: the reason why `torch.compile(fullgraph=True)` cannot compile a member, otherwise empty.
    `shares_queries`: its keys are its queries, so that there is no projection of keys. `pairs`: its weights
    are an attention matrix of queries and tokens. `separate_queries`: the output of a query does not depend
    on other queries, so that the queries of halted tokens can be left out.
    """

    option: ClassVar[str] = "model.attention"
    causal: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    caches: ClassVar[bool] = True
    relates: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    instead: ClassVar[str] = "'softmax', which takes sparse patterns"
    eager: ClassVar[str] = ""
    shares_queries: ClassVar[bool] = False
    pairs: ClassVar[bool] = True
    separate_queries: ClassVar[bool] = False
    reasons: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def expanded(cls, data: object, where: str) -> object:
        """Return the data of a mechanism; a pattern or its expression becomes softmax attention over it."""
        pattern = Pattern.meant(data)
        if pattern is not None:
            return {"kind": "softmax", "pattern": pattern}
        if isinstance(data, str) and (name := first_name(data)) not in cls.kinds:
            error = unknown(f"mechanism or pattern of {where}", name, {*cls.kinds, *Pattern.registry})
            raise InputError(f"{error}; expected {cls.notations()}")
        # Configs saved before `backend` replaced `plain` must still load.
        if isinstance(data, dict) and data.get("kind", cls.kind) in ONCE_PLAIN:
            data = _with_backend(data)
        return super().expanded(data, where)

    @classmethod
    def notations(cls) -> str:
        """Return the accepted forms of a mechanism in a configuration, for error messages."""
        return f"{super().notations()}; or a pattern, as 'Window(64) | Global(1)' or a Pattern"

    def build(self, num_heads: int, head_size: int) -> "Mechanism":
        """Return the module for `num_heads` query heads of size `head_size`."""
        raise NotImplementedError

    def at(self, layer: int) -> "MechanismConfig":
        """Return the mechanism of layer `layer` of a stack: the same in all layers by default."""
        return self

    def definition(self) -> "MechanismConfig":
        """Return the config that computes the plain equation, the reference for tests of the fast form."""
        raise NotImplementedError

    def summed(self, heads: int, kv_heads: int, width: int, length: int) -> int | None:
        """Return the number of elements per run of slots that processes of context parallelism all-gather.

        These are sums of keys; None if the processes exchange keys instead.
        """
        return None

    def cross(self) -> "MechanismConfig":
        """Return the cross-attention of a layer with this mechanism: full softmax attention by default.

        The slots of another sequence have no relation to the slots of the queries, so windows, buckets,
        clusters and spans over them are meaningless. The member's `dropout` and `backend` are kept, if it has
        them. A member with an equation that does not use slots returns itself.
        """
        # Not all members have these options.
        kept = {name: getattr(self, name) for name in ("dropout", "backend") if hasattr(self, name)}
        return MechanismConfig.from_dict({"kind": "softmax", **kept})

    def require(self, ability: str) -> None:
        """Raise `InputError` unless this member has the ability, one of `ABILITIES`."""
        if not getattr(self, ability):
            reason = f" ({self.reasons[ability]})" if ability in self.reasons else ""
            way = f"; or {WAYS_OUT[ability]}" if ability in WAYS_OUT else ""
            raise InputError(
                f"mechanism {quote(self.kind)} cannot {ABILITIES[ability]}{reason}; use {self.instead}{way}"
            )


def _with_backend(data: dict[str, object]) -> dict[str, object]:
    """Return the same options with `backend="definition"` for `plain=True`."""
    plain = data.get("plain")
    if not isinstance(plain, bool):
        return data
    rest = {name: value for name, value in data.items() if name != "plain"}
    return {**rest, "backend": "definition"} if plain else rest


def check_head_size(head_size: int) -> None:
    """Raise `InputError` if `head_size` is less than 1."""
    if head_size < 1:
        raise InputError(f"head_size: expected a width of 1 or more, got {head_size}")


class Mechanism(nn.Module):
    """Base class of attention modules, which mix the values of each head."""

    def tie(self, first: "Mechanism") -> None:
        """Share parameters with the stack's `first` layer, if layers of this member share any."""

    def new_state(self, reserve: int) -> State | None:
        """Return the state before the first token, with space for `reserve` tokens; None if there is none."""
        return None

    def extended(self, state: State, k: Tensor, v: Tensor) -> State:
        """Return the next state after tokens without queries, for a member with `separate_queries`."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: ScoreTerms | None,
    ) -> tuple[Tensor, State | None]:
        """Return y [B, H, Tq, D] and the next state, given q [B, H, Tq, D] and new k, v [B, Hkv, Tq, D].

        `context` describes all keys: the keys of the state followed by the new keys. `position` has the terms
        that the position scheme adds to the scores.
        """
        raise NotImplementedError
