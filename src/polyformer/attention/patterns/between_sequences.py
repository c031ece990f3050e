"""Patterns between two sequences, for the attention of a decoder to its source.

    pattern                       target position i sees the source positions
    Aligned(ratio, left, right)   a(i) - left .. a(i) + right, with a(i) = round(ratio * i)
    WaitK(k, ratio)               0 .. k + floor(ratio * i) - 1: the source arrives while the decoder writes
    SourceSpans()                 that the caller states for i, as from a known alignment

Queries are tokens of the target, keys are tokens of the source. Both are counted in positions, which skip
padding: the context of such a call has the slot of the first query in the target as `q_start`.
"""

import dataclasses
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern, TabulatedPattern, contains, patterns_in
from polyformer.attention.patterns.composition import CompositePattern
from polyformer.attention.patterns.implied import Full
from polyformer.attention.patterns.layout import Keys
from polyformer.core.errors import InputError
from polyformer.core.host_values import on_host
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context, look_up

DENOMINATOR = 1_000_000
"""Largest denominator of a ratio as a fraction."""


class SourcePattern(TabulatedPattern, named=False):
    """A rule by which each query sees a run of source positions; a member defines `spans`."""

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the first and the last source position of each query, [Tq] or [B, Tq] of integers."""
        raise NotImplementedError

    def with_tables(self, context: Context, device: torch.device) -> "SpanTables":
        """Return the lookups in the tables of `spans`."""
        first, last = self.spans(context, device)
        return SpanTables(first, last)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the slots from the first to the last position that these queries see."""
        if torch.compiler.is_compiling() or isinstance(context.offset, Tensor):
            return super().keys(context, start, stop)
        runs = context.once(
            (self, "runs"), lambda: _slot_runs(*self.spans(context, _device(context)), context)
        )
        if runs is None:
            return super().keys(context, start, stop)
        first, last = (edges[:, start:stop] for edges in runs)
        return Keys.of_spans(first, last, context.kv_len)


class RatioPattern(SourcePattern, named=False):
    """Base of the patterns with `ratio` source tokens for each token of the target."""

    ratio: float
    fraction: tuple[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        # In integers, so that no ratio is subject to rounding errors.
        fraction = Fraction(self.ratio).limit_denominator(DENOMINATOR)
        object.__setattr__(self, "fraction", fraction.as_integer_ratio())

    def scaled(self, context: Context, device: torch.device, halves: int = 0) -> Tensor:
        """Return floor(ratio * i + halves / 2) of the positions i of the queries, [Tq] or [B, Tq]."""
        positions = context.q_pos
        if positions is None:
            positions = torch.arange(context.q_len, device=device) + context.offset
        over, under = self.fraction
        return torch.div(2 * over * positions.to(device) + halves * under, 2 * under, rounding_mode="floor")


@dataclasses.dataclass(frozen=True, eq=False)
class SpanTables(Pattern, named=False):
    """The first and the last source position of each query in tables, [Tq] or [B, Tq]."""

    first: Tensor
    last: Tensor

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return first[i] <= position of j <= last[i]."""
        position = context.key_position(b, kv_idx)
        return (position >= look_up(self.first, b, q_idx)) & (position <= look_up(self.last, b, q_idx))


def last_position(context: Context, device: torch.device) -> Tensor:
    """Return the last position of each row's source, [1] or [B, 1]; -1 for a row of padding."""
    if context.kv_pos is None and context.kv_valid is None:
        return torch.full((1,), context.kv_len - 1, device=device)
    position = context.kv_pos
    position = torch.arange(context.kv_len, device=device) if position is None else position.to(device)
    if context.kv_valid is not None:
        position = torch.where(context.kv_valid.to(device).bool(), position, -1)
    return position.amax(-1, keepdim=True)


def is_between_sequences(part: object) -> bool:
    """Return whether `part`, a pattern or a configuration, has a pattern between a target and its source."""
    return contains(part, SourcePattern)


def check_within_sequence(part: object, name: str) -> None:
    """Raise `InputError` if `part`, a pattern or a configuration, has a pattern between two sequences."""
    for pattern in patterns_in(part):
        if isinstance(pattern, SourcePattern):
            raise InputError(
                f"{name}: {pattern.to_text()} is a pattern between a target and its source; "
                "set it as cross_attention of an encoder-decoder, or use a pattern such as Window(64)"
            )


def check_between_sequences(pattern: Pattern, name: str) -> None:
    """Raise `InputError` if `pattern` has a part that is only defined within one sequence."""
    for part in patterns_in(pattern):
        if not isinstance(part, SourcePattern | Full | CompositePattern):
            raise InputError(
                f"{name}: {part.to_text()} is a pattern within one sequence; expected a pattern between a "
                "target and its source, such as Aligned(ratio=1.0, left=16, right=16) or WaitK(3)"
            )


def _device(context: Context) -> torch.device:
    """Return the device of the context's tables; the CPU if it has none."""
    return next((table.device for table in context.tables), torch.device("cpu"))


def _slot_runs(first: Tensor, last: Tensor, context: Context) -> tuple[Tensor, Tensor] | None:
    """Return the first slot and the last slot plus 1 of each query, [B or 1, Tq]; None if the positions of a
    row decrease, as in packed documents."""
    first, last = (on_host(edge).view(-1, context.q_len) for edge in (first, last))
    if context.kv_pos is None:
        return first, last + 1
    position = on_host(context.kv_pos).view(-1, context.kv_len)
    if bool((position.diff() < 0).any()):
        return None
    rows = max(len(first), len(position))
    position, first, last = (table.expand(rows, -1).contiguous() for table in (position, first, last))
    return torch.searchsorted(position, first), torch.searchsorted(position, last, right=True)


@dataclasses.dataclass(frozen=True)
class Aligned(RatioPattern):
    """Aligned window: a token of the target sees the source around the position aligned with it.

    Target position i is aligned with source position a(i) = round(ratio * i), at most the last of its source,
    and sees `left` positions before and `right` after it. `ratio` is the number of source tokens per target
    token, such as 2 for two frames of speech per token. For the attention of a decoder to its source.

    Raises `InputError` for a ratio of 0 or below and for negative widths.
    """

    ratio: PositiveFloat
    left: NonNegativeInt
    right: NonNegativeInt

    paper: ClassVar[str] = "Luong et al. 2015, section 3.2 (local-m)"

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a(i) - left and a(i) + right."""
        center = torch.minimum(self.scaled(context, device, halves=1), last_position(context, device))
        return center - self.left, center + self.right

    @classmethod
    def examples(cls) -> tuple["Aligned", ...]:
        return cls(1.0, 2, 1), cls(0.5, 0, 3), cls(1.7, 4, 0)

    @classmethod
    def picture(cls) -> tuple["Aligned", Context]:
        """Return a target of 24 tokens and its source of 48."""
        return cls(2.0, 4, 4), Context(24, 48, q_start=0)


@dataclasses.dataclass(frozen=True)
class WaitK(RatioPattern):
    """Wait-k: a token of the target sees the source tokens that have arrived by then.

    Target position i, counted from 0, sees the first k + floor(ratio * i) source tokens: the decoder waits
    for k tokens, then reads `ratio` tokens for each token that it writes. With ratio 1 this is
    g(t) = min(k + t - 1, |x|) for t = i + 1. Only this attention is limited: a later source token cannot
    reach the output if the encoder is causal too (`encoder.attention="Causal()"`).

    Raises `InputError` for k below 1 and for a ratio of 0 or below.
    """

    k: PositiveInt
    ratio: PositiveFloat = 1.0

    paper: ClassVar[str] = "Ma et al. 2019 (STACL), section 3.1"

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return 0 and k + floor(ratio * i) - 1."""
        last = self.scaled(context, device) + self.k - 1
        return torch.zeros_like(last), last

    @classmethod
    def examples(cls) -> tuple["WaitK", ...]:
        return cls(3), cls(1, 0.5), cls(2, 1.7)

    @classmethod
    def picture(cls) -> tuple["WaitK", Context]:
        """Return a target and its source of 48 tokens each."""
        return cls(6), Context(48, 48, q_start=0)


@dataclasses.dataclass(frozen=True)
class SourceSpans(SourcePattern):
    """Stated spans: a token of the target sees the source positions that the caller states for it.

    An encoder-decoder takes them as `source_spans` [B, T, 2], the first and the last source position of each
    target position; a token with last < first sees nothing. `attend` reads `Context(q_spans=...)`; without a
    table every key is seen.
    """

    paper: ClassVar[str] = ""

    def spans(self, context: Context, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the table of the caller."""
        if context.q_spans is None:
            first = torch.zeros(context.q_len, dtype=torch.long, device=device)
            return first, first + context.kv_len - 1
        first, last = context.q_spans.to(device).unbind(1)
        return first, last

    @classmethod
    def picture(cls) -> tuple["SourceSpans", Context]:
        """Return words of a source of 48 tokens for the 24 tokens of a target."""
        first = torch.tensor([0, 7, 12, 21, 30, 41]).repeat_interleave(4)
        last = torch.tensor([6, 11, 20, 29, 40, 47]).repeat_interleave(4)
        return cls(), Context(24, 48, q_start=0, q_spans=torch.stack([first, last]).unsqueeze(0))
