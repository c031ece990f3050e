"""RoPE extensions that depend on the length of a text: short texts keep the rotations of training.

The length counts the tokens of a query's own document up to the query. It depends neither on later tokens,
nor on other rows of the batch, nor on the calls in which a text is read: one pass, chunks and single tokens
give the same result. Implementations that use the length of the longest text of a call have none of these
properties.

A KV cache contains keys with the rotations of short texts. For longer texts, queries and all keys are rotated
further, by the difference of the two angles.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from polyformer.attention.patterns import Causal, Pattern, Window
from polyformer.attention.patterns.composition import Without
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.attention.positions.rope.channel_pairs import Angles
from polyformer.attention.positions.rope.context_extension import RopeExtensionConfig, ntk_frequencies
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import on_host
from polyformer.core.ranges import PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context


class Rotation(NamedTuple):
    """A set of pairs, and further angles [..., T, W/2] of its queries and keys at positions [..., T, 1].

    `pairs`: None for all pairs. `queries`, `keys`: None if they are not rotated further.
    """

    pairs: Pattern | None
    queries: Angles | None = None
    keys: Angles | None = None


@dataclasses.dataclass(frozen=True)
class QueryPositions(Pattern, named=False):
    """Queries with positions start <= i < stop; `stop` None for no limit."""

    start: int
    stop: int | None = None

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return start <= pos_i < stop, for every key."""
        pos = context.query_position(b, q_idx)
        inside = pos >= self.start
        return (inside if self.stop is None else inside & (pos < self.stop)) & (kv_idx >= 0)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return all keys if a query has such a position; without a mask if all queries have."""
        least, greatest = position_range(context, start, stop)
        end = math.inf if self.stop is None else self.stop
        everything = clip(0, context.kv_len, context.kv_len)
        if greatest < self.start or least >= end:
            return Keys(())
        return Keys(everything, everything if self.start <= least and greatest < end else ())

    def is_static(self) -> bool:
        """Return False: the needed keys depend on positions."""
        return False


def position_range(context: Context, start: int, stop: int) -> tuple[int, int]:
    """Return the least and the greatest position of the queries start <= i < stop of all rows.

    In a traced graph, which cannot read positions, any position up to the number of keys is assumed.
    """
    if context.q_pos is not None and torch.compiler.is_compiling():
        return 0, context.kv_len - 1
    if context.q_pos is None:
        return context.offset + start, context.offset + stop - 1
    least, greatest = on_host(context.q_pos)[..., start:stop].aminmax()
    return int(least), int(greatest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthExtensionConfig(RopeExtensionConfig):
    """Base of the extensions that depend on the length of a text; none up to the length of training."""

    original_max_positions: PositiveInt  # the length of training

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return the frequencies of short texts, by default theta."""
        return theta

    def bands(self, theta: Tensor, base: float, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first query positions of ranges up to `last`, and the frequencies of each range.

        The first range starts at 0, with the frequencies `theta` of short texts.
        """
        raise NotImplementedError

    def rotations(self, theta: Tensor, base: float, first: int, last: int) -> list[Rotation]:
        """Return the rotations of queries at positions from `first` to `last`; none for a short text."""
        if last < self.original_max_positions:
            return []
        ranges = [*self.bands(theta, base, last), (None, theta)]
        rotations = []
        for (start, new), (stop, _) in itertools.pairwise(ranges):
            assert start is not None
            if stop is None or stop > first:
                whole = start <= first and (stop is None or last < stop)
                pairs = None if whole else QueryPositions(start, stop)
                angles = functools.partial(torch.mul, new - theta) if start else None
                rotations.append(Rotation(pairs, angles, angles))
        return rotations


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicNtkConfig(LengthExtensionConfig):
    """Dynamic NTK: the base grows with the length of the text, rounded up to the original length times 2^b.

    A text of L tokens has the base of NTK with the factor `factor L / original_max_positions - factor + 1`.
    The rounding makes few different rotations; the source has one for every length.
    """

    kind: ClassVar[str] = "dynamic"
    paper: ClassVar[str] = "Peng et al. 2024 (YaRN), section 3.3; emozilla 2023 (dynamically scaled RoPE)"

    @classmethod
    def options_for(cls, before: int, after: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the source's factor 1: the base follows the length of each text, not of the longest."""
        return {**super().options_for(before, after, options), "factor": 1.0}

    def extends(self, before: int, after: int) -> bool:
        """Return whether any text changes; with a factor of 1 longer texts do."""
        return super().extends(before, after) or after > before

    def bands(self, theta: Tensor, base: float, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the ranges 0 .. N, N .. 2 N, 2 N .. 4 N, ... of N original positions."""
        yield 0, theta
        length = self.original_max_positions
        while length <= last:
            stretch = self.factor * 2 * length / self.original_max_positions - self.factor + 1
            yield length, ntk_frequencies(theta, stretch)
            length *= 2

    @classmethod
    def examples(cls) -> tuple["DynamicNtkConfig", ...]:
        return (cls(factor=2.0, original_max_positions=3),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeConfig(LengthExtensionConfig):
    """LongRoPE: each pair has one divisor of its frequency for short texts and one for long texts.

    Both are found by a search over perplexities (not here), and come with a checkpoint such as Phi-3.
    """

    short_factor: tuple[PositiveFloat, ...]
    long_factor: tuple[PositiveFloat, ...]
    attention_factor: PositiveFloat | None = None  # of rotated channels; default sqrt(1 + ln factor / ln N)

    kind: ClassVar[str] = "longrope"
    paper: ClassVar[str] = "Ding et al. 2024 (LongRoPE), section 3; Abdin et al. 2024 (Phi-3), section 2"

    @property
    def channel_scale(self) -> float:
        """Return `attention_factor`, or by default sqrt(1 + ln factor / ln original_max_positions)."""
        if self.attention_factor is not None:
            return self.attention_factor
        length = max(self.original_max_positions, 2)
        return math.sqrt(1 + math.log(self.factor) / math.log(length))

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return theta / short_factor."""
        return theta / self._tensor(self.short_factor, theta)

    def bands(self, theta: Tensor, base: float, last: int) -> Iterator[tuple[int, Tensor]]:
        """Yield short texts and long texts."""
        yield 0, theta
        # `theta` has the divisors of short texts already.
        short, long = (self._tensor(factor, theta) for factor in (self.short_factor, self.long_factor))
        yield self.original_max_positions, theta * short / long

    @staticmethod
    def _tensor(factor: tuple[float, ...], theta: Tensor) -> Tensor:
        if len(factor) not in (1, len(theta)):
            raise InputError(
                f"short_factor, long_factor: expected {len(theta)} numbers, one for each pair of rotated "
                f"channels, or one number for all pairs, got {len(factor)}"
            )
        return theta.new_tensor(factor)

    @classmethod
    def examples(cls) -> tuple["LongRopeConfig", ...]:
        return (cls(factor=2.0, original_max_positions=4, short_factor=(1.1,), long_factor=(3.0,)),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfExtendConfig(LengthExtensionConfig):
    """Self-Extend: distant tokens share positions in groups of `factor`; near tokens keep theirs.

    For queries at `original_max_positions` or later, keys at a distance below `window` have their own
    positions, and others the positions j // factor and i // factor + window - window // factor. No distance
    exceeds the distances of training in texts up to (N - window) factor + window tokens.
    """

    factor: PositiveInt
    window: PositiveInt = 1024

    kind: ClassVar[str] = "self_extend"
    paper: ClassVar[str] = "Jin et al. 2024 (Self-Extend), section 3.2"

    @classmethod
    def options_for(cls, before: int, after: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the least factor with which no distance exceeds the distances of training."""
        known = super().options_for(before, after, options)
        window = options.get("window", cls.window)
        if not isinstance(window, int) or not 0 < window < before:
            raise InputError(
                f"window: expected 1 to {before - 1}, less than the {before} positions of training, "
                f"got {quote(window)}"
            )
        return {**known, "factor": max(math.ceil((after - window) / (before - window)), 1)}

    def rotations(self, theta: Tensor, base: float, first: int, last: int) -> list[Rotation]:
        """Return the near and the distant pairs; none for a short text."""
        if last < self.original_max_positions:
            return []
        near: Pattern = Window(self.window - 1, 0)
        distant: Pattern = Without(Causal(), near)
        if first < self.original_max_positions:
            distant = distant & QueryPositions(self.original_max_positions)
            near = Without(Causal(), distant)
        group, shift = self.factor, self.window - self.window // self.factor
        return [
            Rotation(near),
            Rotation(
                distant,
                lambda pos: (pos // group + shift - pos) * theta,
                lambda pos: (pos // group - pos) * theta,
            ),
        ]

    @classmethod
    def examples(cls) -> tuple["SelfExtendConfig", ...]:
        return (cls(factor=2, original_max_positions=5, window=3),)
