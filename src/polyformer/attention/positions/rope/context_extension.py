"""RoPE context extension: lower frequencies, so that a model trained on short texts can process longer texts.

The extensions of this module are the same at every length; length_extension.py has the extensions that depend
on the length of a text.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat, PositiveInt


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
