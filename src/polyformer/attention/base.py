"""The seam where attention mechanisms meet the model: projected heads in, mixed heads out."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Protocol

from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.expression import first_name
from polyformer.core.state import State
from polyformer.dot_product.relative import Relative
from polyformer.patterns.base import Pattern, ScoreMod
from polyformer.sequence.context import Context


class ScoreTerms(Protocol):
    """What a position scheme does to scores, asked once all keys k of the queries q are known."""

    @property
    def farthest(self) -> int | None:
        """The distance from which on all are treated alike, on either side; None where there is none."""

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """A function of every score and its query and key, None where the scheme has none."""

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Terms of the scores and values by distance, None where the scheme has none."""


ABILITIES = {
    "causal": "run in a decoder: it sees later tokens",
    "packs": "keep documents packed in one row apart",
    "caches": "go on from a state",
    "relates": "take positions that change scores",
    "remembers": "attend to a memory of earlier segments",
    "spreads": "take a sequence that is spread over processes",
}
"""What a mechanism may be unable to do, by the class attribute that declares it."""

WAYS_OUT = {
    "packs": "give each document rows of its own (--task.packed false, where the task has it)",
    "relates": "take a position that changes none, such as 'learned', 'sinusoidal', 'rope' or 'none'",
}
"""How to do without an ability, other than by another mechanism."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig(Config):
    """Family of mechanisms: `build(num_heads, head_size)` makes the module.

    `causal`, `packs`, `caches`, `relates` (to take the score terms of a position scheme) and `remembers` (to
    take more keys than queries, a memory's first, and to have a key-value cache for state) and `spreads` (to
    take one process's share of a sequence's tokens) declare what a member can do; errors name what to use
    `instead`. `eager`: the reason why `torch.compile(fullgraph=True)`
    cannot take a member, empty where it can. `shares_queries`: its keys are its queries, so that there is no
    projection of keys. `pairs`: its weights are an attention matrix of queries and tokens.
    `separate_queries`: what a query gets depends on no other, so that those of halted tokens can be left out.
    `reasons`: why a member is unable, by ability, where its equation does not say so itself.
    """

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
        """A pattern, or the expression of one, is softmax attention over it."""
        pattern = Pattern.meant(data)
        if pattern is not None:
            return {"kind": "softmax", "pattern": pattern}
        if isinstance(data, str) and (name := first_name(data)) not in cls.kinds:
            error = unknown(f"mechanism or pattern of {where}", name, {*cls.kinds, *Pattern.registry})
            raise InputError(f"{error}; expected {cls.ways()}")
        return super().expanded(data, where)

    @classmethod
    def ways(cls) -> str:
        """What may stand for a mechanism in a configuration, for error messages."""
        return f"{super().ways()}; or a pattern, as 'Window(64) | Global(1)' or a Pattern"

    def build(self, num_heads: int, head_size: int) -> "Mechanism":
        """The module, for `num_heads` query heads of `head_size` numbers each."""
        raise NotImplementedError

    def at(self, layer: int) -> "MechanismConfig":
        """The mechanism of layer `layer` of a stack: the same in all layers by default."""
        return self

    def definition(self) -> "MechanismConfig":
        """The same function computed by its plain equation, which tests compare the fast form with."""
        raise NotImplementedError

    def summed(self, heads: int, kv_heads: int, width: int, length: int) -> int | None:
        """How many numbers the sums have that a process of a spread sequence makes of its keys and shows all
        others, for each of its runs of slots; None where they exchange keys."""
        return None

    def cross(self) -> "MechanismConfig":
        """The cross-attention of a layer that has this mechanism: full softmax attention by default.

        The slots of another sequence say nothing about those of the queries, so windows, buckets, clusters
        and spans over them mean nothing. The member's own `dropout` and `backend` stay, where it has them.
        A member whose equation asks nothing of slots returns itself.
        """
        kept = {name: getattr(self, name) for name in ("dropout", "backend") if hasattr(self, name)}
        return MechanismConfig.from_dict({"kind": "softmax", **kept})

    def require(self, ability: str) -> None:
        """Raises `InputError` unless this member has the ability, one of `ABILITIES`."""
        if not getattr(self, ability):
            reason = f" ({self.reasons[ability]})" if ability in self.reasons else ""
            way = f"; or {WAYS_OUT[ability]}" if ability in WAYS_OUT else ""
            raise InputError(
                f"mechanism {quote(self.kind)} cannot {ABILITIES[ability]}{reason}; use {self.instead}{way}"
            )


def check_head_size(head_size: int) -> None:
    """Raises `InputError` for heads of no width."""
    if head_size < 1:
        raise InputError(f"head_size: expected a width of 1 or more, got {head_size}")


class Mechanism(nn.Module):
    """Mixes the values of each head."""

    def tie(self, first: "Mechanism") -> None:
        """Shares parameters with the stack's `first` layer, where the member's layers share some."""

    def new_state(self, reserve: int) -> State | None:
        """The state before the first token, with room for `reserve` tokens; None where there is none."""
        return None

    def extended(self, state: State, k: Tensor, v: Tensor) -> State:
        """The next state where no token asks, for a member with `separate_queries`."""
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
        """q [B, H, Tq, D], new keys and values k, v [B, Hkv, Tq, D] -> y [B, H, Tq, D] and the next state.

        The keys that `context` describes are those of the state followed by the new ones. `position` is what
        the position scheme adds to the scores.
        """
        raise NotImplementedError
