"""RoPE extensions: other angles, so that a model trained on N tokens can process longer texts.

    interpolation   theta_m / factor
    ntk             (base * factor^(W / (W - 2)))^(-2m / W)
    yarn            theta_m (1 - s_m + s_m / factor), with s_m growing linearly in m from 0 to 1
    llama3          theta_m (s_m + (1 - s_m) / factor), with s_m growing linearly in N theta_m from 0 to 1
    dynamic         ntk, with a factor that grows with the length of a text
    longrope        theta_m / short_factor_m in texts up to N, then theta_m / long_factor_m
    self_extend     theta_m, with the positions of distant tokens divided by `factor`

theta_m is the angle of pair m of W channels between two neighbouring positions. The first four are the same
at every length. The others depend on the length of a text, and short texts keep the rotations of training.
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
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge
from torch import Tensor

from polyformer.attention.patterns import Causal, Pattern, Window
from polyformer.attention.patterns.composition import Without
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import on_host
from polyformer.core.ranges import PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeExtensionConfig(Config):
    """Family of RoPE extensions to texts `factor` times longer than in training."""

    factor: Annotated[float, Ge(1)]

    @classmethod
    def options_for(cls, before: int, after: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that follow from the lengths of training and of the longest text.

        `options`: the other options, as the user gives them.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known = {"factor": after / before, "original_max_positions": before}
        return {name: value for name, value in known.items() if name in names}

    def extends(self, before: int, after: int) -> bool:
        """Return whether any text changes, for the lengths of training and of the longest text."""
        return self.factor != 1

    @property
    def channel_scale(self) -> float:
        """Return the factor of rotated channels; scores are multiplied by its square."""
        return 1.0

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return new frequencies [W/2] for the frequencies `theta` of training."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpolationConfig(RopeExtensionConfig):
    """Position interpolation: all positions are divided by `factor`."""

    kind: ClassVar[str] = "interpolation"
    paper: ClassVar[str] = "Chen et al. 2023 (position interpolation), section 2.3"

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return theta / factor."""
        return theta / self.factor

    @classmethod
    def examples(cls) -> tuple["InterpolationConfig", ...]:
        return (cls(factor=2.0),)


def ntk_frequencies(theta: Tensor, factor: float) -> Tensor:
    """Return theta_m factor^(-m / (W/2 - 1)): theta for the first pair, theta / factor for the last."""
    last = max(len(theta) - 1, 1)
    return theta * factor ** (-torch.arange(len(theta), device=theta.device, dtype=theta.dtype) / last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NtkConfig(RopeExtensionConfig):
    """NTK-aware: a larger base keeps the fastest pair and slows the slowest pair down by `factor`."""

    kind: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "Peng et al. 2024 (YaRN), section 3.1"

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return (base * factor^(W / (W - 2)))^(-2m / W)."""
        return ntk_frequencies(theta, self.factor)

    @classmethod
    def examples(cls) -> tuple["NtkConfig", ...]:
        return (cls(factor=2.0),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig(RopeExtensionConfig):
    """YaRN: pairs that rotate often over the length of training stay, pairs that rotate rarely slow down."""

    original_max_positions: PositiveInt  # the length of training
    beta_fast: float = 32.0  # pairs with more rotations over that length do not change
    beta_slow: float = 1.0  # pairs with fewer rotations are interpolated in full
    attention_factor: PositiveFloat | None = None  # factor of rotated channels; by default 0.1 ln(factor) + 1
    truncate: bool = True  # whether the bounds are rounded outwards to whole pairs

    kind: ClassVar[str] = "yarn"
    paper: ClassVar[str] = "Peng et al. 2024 (YaRN), sections 3.2 to 3.4"

    def __post_init__(self) -> None:
        if not 0 < self.beta_slow < self.beta_fast:
            raise InputError(
                f"beta_slow, beta_fast: expected 0 < beta_slow < beta_fast, "
                f"got {self.beta_slow}, {self.beta_fast}"
            )

    @property
    def channel_scale(self) -> float:
        """Return `attention_factor`, or by default 0.1 ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return theta with interpolation that grows linearly between the two bounds.

        The bounds are rounded outwards to whole pairs, if `truncate` is set.
        """
        first, last = (self._pair(beta, len(theta), base) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(theta) - 1)
        pairs = torch.arange(len(theta), device=theta.device, dtype=theta.dtype)
        share = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        return theta * (1 - share + share / self.factor)

    def _pair(self, rotations: float, pairs: int, base: float) -> float:
        """Return the (fractional) pair with this number of rotations over the length of training."""
        # Solve original_max_positions * base^(-2m / W) = 2 pi rotations for m, with W = 2 pairs.
        return pairs * math.log(self.original_max_positions / (rotations * 2 * math.pi)) / math.log(base)

    @classmethod
    def examples(cls) -> tuple["YarnConfig", ...]:
        return (cls(factor=2.0, original_max_positions=64),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Config(RopeExtensionConfig):
    """Llama 3.1: pairs that rotate rarely over the length of training are interpolated, others in part."""

    original_max_positions: PositiveInt  # the length of training
    low_freq_factor: float = 1.0  # pairs with fewer rotations over that length are interpolated in full
    high_freq_factor: float = 4.0  # pairs with more rotations do not change

    kind: ClassVar[str] = "llama3"
    paper: ClassVar[str] = "Grattafiori et al. 2024 (Llama 3), the code of version 3.1"

    def __post_init__(self) -> None:
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"low_freq_factor, high_freq_factor: expected 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor}, {self.high_freq_factor}"
            )

    def scaled_frequencies(self, theta: Tensor, base: float) -> Tensor:
        """Return theta with interpolation that changes linearly in the rotations between the two bounds."""
        rotations = self.original_max_positions * theta / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        stays = ((rotations - self.low_freq_factor) / width).clamp(0, 1)
        return theta * (stays + (1 - stays) / self.factor)

    @classmethod
    def examples(cls) -> tuple["Llama3Config", ...]:
        return (cls(factor=2.0, original_max_positions=64),)


Angles = Callable[[Tensor], Tensor]
"""A function of positions [B or 1, 1, T, 1] that returns angles [B or 1, 1, T, W/2]."""


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
