"""The interface between attention mechanisms and the model: projected heads in, mixed heads out."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from polyformer.attention.functional.isolation import empty
from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.parsing import first_name
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State

MechanismBackend = Literal["auto", "definition"]
"""Values of `backend` for a mechanism with its own fast implementation: that, or the plain equation."""


class ScoreTerms(Protocol):
    """The effect of a position scheme on scores, computed when all keys k of the queries q are known."""

    @property
    def farthest(self) -> int | None:
        """The distance beyond which all distances are treated alike, on both sides; None for no limit."""

    @property
    def is_plain(self) -> bool:
        """Whether there are no `parts`, no `score_mod` and no `relative`, whatever the call."""
        ...

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """Return sets of pairs with their own rotations of q and k; none if all pairs have the same."""
        ...

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """Return a function of every score, its query and key; None if the scheme has none."""

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the terms of scores and values by distance; None if the scheme has none."""


@dataclasses.dataclass(frozen=True, eq=False)
class DelegatedTerms:
    """Base of terms that are those of `position` in all that a subclass does not define itself."""

    position: ScoreTerms

    @property
    def farthest(self) -> int | None:
        """See `ScoreTerms.farthest`."""
        return self.position.farthest

    @property
    def is_plain(self) -> bool:
        """See `ScoreTerms.is_plain`."""
        return self.position.is_plain

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """See `ScoreTerms.parts`."""
        return self.position.parts(q, k, context)

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """See `ScoreTerms.score_mod`."""
        return self.position.score_mod(q, k, context)

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """See `ScoreTerms.relative`."""
        return self.position.relative(q, k, context)


PositionTerms = ScoreTerms | None
"""The terms of a model's position scheme; None outside a model."""

CAPABILITIES = {
    "causal": "run in a decoder: it sees later tokens",
    "supports_packing": "separate documents that are packed in one row",
    "supports_kv_cache": "continue from a KV cache or another state",
    "supports_score_bias": "use a position scheme that changes the scores",
    "supports_part_rotations": "use rotary positions that depend on the length of the text",
    "supports_recurrence": "attend to a memory of earlier segments",
    "supports_context_parallel": "run with context parallelism, a sequence spread over processes",
}
"""Capabilities that a mechanism may lack, by the class attribute that declares them; for error messages."""

ALTERNATIVES = {
    "supports_packing": "put each document in a separate row (--task.packed false, if the task has it)",
    "supports_score_bias": (
        "choose a position scheme that leaves scores unchanged: 'learned', 'sinusoidal', 'rope' or 'none'"
    ),
    "supports_part_rotations": "choose an extension that is the same at every length, such as 'yarn'",
}
"""Alternatives to a missing capability, other than another mechanism."""


class Heads(NamedTuple):
    """The queries, keys and values of a call: q [B, H, Tq, D], k [B, Hkv, Tk, D] and v [B, Hkv, Tk, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclasses.dataclass(frozen=True)
class ProjectedHeads:
    """The numbers of heads of queries, keys and values that a layer projects, and their channels.

    own: whether they differ from the stack's, so that norms and positions of the stack do not fit them.
    steps: heads of values for a head of outputs.
    """

    queries: int
    keys: int
    values: int
    key_size: int
    value_size: int
    own: bool = False
    steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismConfig(Config):
    """Family of mechanisms: `build(num_heads, head_size)` makes the module.

    Class attributes declare the capabilities of a member (`CAPABILITIES`); errors name the alternative
    `instead`. `supports_score_bias`: accepts the score terms of a position scheme. `supports_part_rotations`:
    rotates sets of pairs by different angles (`ScoreTerms.parts`). `supports_recurrence`: accepts more keys
    than queries, with the keys of a memory first, and has a KV cache as state. `supports_context_parallel`:
    accepts the tokens of one process out of a longer sequence. `reasons`: why a member lacks a capability, if
    its equation does not show it.

    `eager`: the reason why `torch.compile(fullgraph=True)` cannot compile a member, otherwise empty.
    `shares_queries`: its keys are its queries, so that there is no projection of keys. `pairs`: its weights
    are an attention matrix of queries and tokens. `separate_queries`: the output of a query does not depend
    on other queries, so that the queries of halted tokens can be left out. `reads_any_sequence`: its equation
    does not use slots, so that it can be the cross-attention of a layer. `head_multiple`: divides its
    numbers of query heads and of key heads.
    """

    option: ClassVar[str] = "model.attention"
    causal: ClassVar[bool] = True
    supports_packing: ClassVar[bool] = True
    supports_kv_cache: ClassVar[bool] = True
    supports_score_bias: ClassVar[bool] = True
    supports_part_rotations: ClassVar[bool] = False
    supports_recurrence: ClassVar[bool] = False
    supports_context_parallel: ClassVar[bool] = False
    instead: ClassVar[str] = "'softmax', which takes sparse patterns"
    eager: ClassVar[str] = ""
    shares_queries: ClassVar[bool] = False
    pairs: ClassVar[bool] = True
    separate_queries: ClassVar[bool] = False
    reads_any_sequence: ClassVar[bool] = False
    head_multiple: ClassVar[int] = 1
    reasons: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def expanded(cls, data: object, where: str) -> object:
        """Return the data of a mechanism; a pattern or its expression becomes softmax attention over it."""
        # "Window(64)" is short for softmax attention over this pattern.
        pattern = Pattern.parse(data)
        if pattern is not None:
            return {"kind": "softmax", "pattern": pattern}
        if isinstance(data, str) and (name := first_name(data)) not in cls.kinds:
            error = unknown(f"mechanism or pattern of {where}", name, {*cls.kinds, *Pattern.registry})
            raise InputError(f"{error}; expected {cls.notations()}")
        return super().expanded(data, where)

    @classmethod
    def notations(cls) -> str:
        """Return the accepted forms of a mechanism in a configuration, for error messages."""
        return f"{super().notations()}; or a pattern, as 'Window(64) | Global(1)' or a Pattern"

    def build(self, num_heads: int, head_size: int) -> "Mechanism":
        """Return the module for `num_heads` query heads of size `head_size`."""
        raise NotImplementedError

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """Return the channels of every gate that the layer projects from its input; empty for none.

        If there are any, the module's `forward` takes them as a last argument, [B, T, all channels]. A gate
        of the heads' outputs is the last and has the name "output".
        """
        return {}

    def projected_heads(self, num_heads: int, kv_heads: int, head_size: int) -> "ProjectedHeads":
        """Return the heads of the layer's projections, for the heads of the stack."""
        return ProjectedHeads(num_heads, kv_heads, kv_heads, head_size, head_size)

    def for_layer(self, layer: int) -> "MechanismConfig":
        """Return the mechanism of layer `layer` of a stack: the same in all layers by default."""
        return self

    def definition(self) -> "MechanismConfig":
        """Return the config that computes the plain equation, the reference for tests of the fast form."""
        # A member without the option has no other form than its equation.
        return dataclasses.replace(self, backend="definition") if hasattr(self, "backend") else self

    def all_gathered_elements(
        self, heads: int, kv_heads: int, width: int, length: int, causal: bool
    ) -> int | None:
        """Return the number of elements per run of slots that processes of context parallelism all-gather.

        These are sums of keys or states; None if the processes exchange keys instead.
        """
        return None

    def cross(self, pattern: Pattern | None = None) -> "MechanismConfig":
        """Return the cross-attention of a layer with this mechanism: softmax attention by default.

        The slots of another sequence have no relation to the slots of the queries, so windows, buckets,
        clusters and spans over them are meaningless. The member's `dropout` and `backend` are kept, if it has
        them.

        pattern: between the two sequences, such as `Aligned`; None for all keys.
        """
        if self.reads_any_sequence and pattern is None:
            return self
        # Not all members have these options.
        kept = {name: getattr(self, name) for name in ("dropout", "backend") if hasattr(self, name)}
        return MechanismConfig.from_dict({"kind": "softmax", **kept, "pattern": pattern})

    def within(self, pattern: Pattern) -> "MechanismConfig":
        """Return the mechanism with only the pairs of a pattern too; raises `InputError` if it takes none."""
        raise InputError(
            f"memory: mechanism {quote(self.kind)} cannot leave out the keys that a cache of the first and "
            f"the latest tokens drops; use {self.instead}"
        )

    def require(self, ability: str) -> None:
        """Raise `InputError` unless this member has the capability, one of `CAPABILITIES`."""
        if not getattr(self, ability):
            reason = f" ({self.reasons[ability]})" if ability in self.reasons else ""
            way = f"; or {ALTERNATIVES[ability]}" if ability in ALTERNATIVES else ""
            raise InputError(
                f"mechanism {quote(self.kind)} cannot {CAPABILITIES[ability]}{reason}; "
                f"use {self.instead}{way}"
            )


def check_head_size(head_size: int) -> None:
    """Raise `InputError` if `head_size` is less than 1."""
    if head_size < 1:
        raise InputError(f"head_size: expected a width of 1 or more, got {head_size}")


class Mechanism(nn.Module):
    """Base class of attention modules, which mix the values of each head."""

    reads_plain_positions = True
    """False if `position` may be None for a scheme that adds no terms to the scores (`Position.is_plain`)."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise `InputError` for a capability of `CAPABILITIES` in the module, where nothing reads it."""
        super().__init_subclass__(**options)
        for name in CAPABILITIES:
            if name in vars(cls):
                raise InputError(
                    f"{cls.__name__}.{name}: a model reads it from the configuration, the class that has "
                    f"`kind` and `build`; move the line `{name} = ...` there"
                )

    def share_parameters(self, first: "Mechanism") -> None:
        """Share parameters with the stack's `first` layer, if layers of this member share any."""

    def empty_output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output [B, H, Tq, Dv] of a call without rows or queries; all gradients are zeros."""
        return empty(q, k, v)

    def probe(self) -> "Mechanism":
        """Return a module whose output for a query is 0 just where it reads only values of 0.

        The module itself by default. The isolation of values that are not finite runs it.
        """
        return self

    def new_state(self, reserve: int) -> State | None:
        """Return the state before the first token, with space for `reserve` tokens; None if there is none."""
        return None

    def reach(self) -> Reach | None:
        """Return which earlier keys of its KV cache a query may read; None for all, or for another state."""
        return None

    def extended(self, state: State, k: Tensor, v: Tensor) -> State:
        """Return the next state after tokens without queries, for a member with `separate_queries`."""
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return y [B, H, Tq, D] and the next state, given q [B, H, Tq, D] and new k, v [B, Hkv, Tq, D].

        `context` describes all keys: the keys of the state followed by the new keys. `position` has the terms
        that the position scheme adds to the scores.
        """
        raise NotImplementedError
