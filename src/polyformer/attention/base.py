"""The seam where attention mechanisms meet the model: projected heads in, mixed heads out."""

import dataclasses
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

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None: ...

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None: ...


ABILITIES = {
    "causal": "run in a decoder: it sees later tokens",
    "packs": "keep documents packed in one row apart",
    "caches": "go on from a state",
    "relates": "take positions that change scores",
}
"""What a mechanism may be unable to do, by the class attribute that says so."""

WAYS_OUT = {
    "packs": "give each document rows of its own (--task.packed false, where the task has it)",
    "relates": "take a position that changes none, such as 'learned', 'sinusoidal', 'rope' or 'none'",
}
"""How to do without an ability, beside another mechanism."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig(Config):
    """Family of mechanisms: `build(num_heads, head_size)` makes the module.

    `causal`, `packs`, `caches` and `relates` (to take the score terms of a position scheme) say what a member
    can do; asked for more, it names what to use `instead`. `eager` says why `torch.compile(fullgraph=True)`
    cannot take a member, where it cannot. `shares_queries`: its keys are its queries, so that there is no
    projection of keys. `pairs`: its weights are an attention matrix, of every query and every token.
    """

    causal: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    caches: ClassVar[bool] = True
    relates: ClassVar[bool] = True
    instead: ClassVar[str] = "'softmax', which takes sparse patterns"
    eager: ClassVar[str] = ""
    shares_queries: ClassVar[bool] = False
    pairs: ClassVar[bool] = True

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
        return f"{super().ways()}; or a pattern, as 'Window(64) | Global(1)' or a Pattern"

    def build(self, num_heads: int, head_size: int) -> "Mechanism":
        raise NotImplementedError

    def at(self, layer: int) -> "MechanismConfig":
        """What layer `layer` of a stack has; the same in all, unless the member says otherwise."""
        return self

    def definition(self) -> "MechanismConfig":
        """The same function computed plainly by its equation: what tests compare the fast form with."""
        raise NotImplementedError

    def cross(self) -> "MechanismConfig":
        """What reads another sequence (cross-attention), whose slots say nothing about the queries' own."""
        return self

    def require(self, ability: str) -> None:
        """Raises `InputError` unless this member has the ability, one of `ABILITIES`."""
        if not getattr(self, ability):
            way = f"; or {WAYS_OUT[ability]}" if ability in WAYS_OUT else ""
            raise InputError(
                f"mechanism {quote(self.kind)} cannot {ABILITIES[ability]}; use {self.instead}{way}"
            )


def check_head_size(head_size: int) -> None:
    """Raises `InputError` for heads of no width."""
    if head_size < 1:
        raise InputError(f"head_size: expected a width of 1 or more, got {head_size}")


class Mechanism(nn.Module):
    """Mixes the values of each head."""

    def tie(self, first: "Mechanism") -> None:
        """Makes parameters those of the stack's `first` layer, where layers share some."""

    def new_state(self, reserve: int) -> State | None:
        """The state before the first token, with room for `reserve` tokens; None where there is none."""
        return None

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

        The keys that `context` describes are those of the state followed by the new ones. `position` tells
        what the position scheme adds to the scores.
        """
        raise NotImplementedError
