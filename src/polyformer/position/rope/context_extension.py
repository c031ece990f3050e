"""RoPE context extension: lower frequencies, with which a model trained on short texts reads longer ones.

All are static, the same at every length, as a cache of rotated keys requires: the "dynamic" ones, which
change with the length of the text, disagree with the keys that they have cached.
"""

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeExtensionConfig(Config):
    """Family of ways to read texts `factor` times longer than those of training."""

    factor: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise InputError(f"factor: expected 1 or more, new length by old length, got {self.factor}")

    @property
    def size(self) -> float:
        """What rotated channels are multiplied by; scores by its square."""
        return 1.0

    def extended(self, theta: Tensor, base: float) -> Tensor:
        """New frequencies [W/2] for `theta`, those of the model as trained."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterpolationConfig(RopeExtensionConfig):
    """Position interpolation: all positions divided by `factor`."""

    kind: ClassVar[str] = "interpolation"
    paper: ClassVar[str] = "Chen et al. 2023 (position interpolation), section 2.3"

    def extended(self, theta: Tensor, base: float) -> Tensor:
        """theta / factor."""
        return theta / self.factor

    @classmethod
    def examples(cls) -> tuple["InterpolationConfig", ...]:
        """Small instances that the contract tests run."""
        return (cls(factor=2.0),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NtkConfig(RopeExtensionConfig):
    """NTK-aware: a larger base; the fastest pair rotates as before, the slowest `factor` times slower."""

    kind: ClassVar[str] = "ntk"
    paper: ClassVar[str] = "Peng et al. 2024 (YaRN), section 3.1"

    def extended(self, theta: Tensor, base: float) -> Tensor:
        """(base * factor^(W / (W - 2)))^(-2m / W)."""
        last = max(len(theta) - 1, 1)
        return theta * self.factor ** (
            -torch.arange(len(theta), device=theta.device, dtype=theta.dtype) / last
        )

    @classmethod
    def examples(cls) -> tuple["NtkConfig", ...]:
        """Small instances that the contract tests run."""
        return (cls(factor=2.0),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig(RopeExtensionConfig):
    """YaRN: pairs that rotate often over the old length stay, those that rotate rarely are interpolated."""

    original_max_positions: int  # the length of training
    beta_fast: float = 32.0  # rotations over that length, from which on a pair stays
    beta_slow: float = 1.0  # rotations, up to which a pair is interpolated
    attention_factor: float | None = None  # the size of rotated channels; by default 0.1 ln(factor) + 1

    kind: ClassVar[str] = "yarn"
    paper: ClassVar[str] = "Peng et al. 2024 (YaRN), sections 3.2 to 3.4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_positions < 1:
            raise InputError(f"original_max_positions: expected 1 or more, got {self.original_max_positions}")
        if not 0 < self.beta_slow < self.beta_fast:
            raise InputError(
                f"beta_slow, beta_fast: expected 0 < beta_slow < beta_fast, "
                f"got {self.beta_slow}, {self.beta_fast}"
            )
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise InputError(f"attention_factor: expected a number above 0, got {self.attention_factor}")

    @property
    def size(self) -> float:
        """attention_factor, or 0.1 ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def extended(self, theta: Tensor, base: float) -> Tensor:
        """Between the two bounds, rounded outwards to whole pairs, interpolation sets in evenly."""
        first = max(math.floor(self._pair(self.beta_fast, len(theta), base)), 0)
        last = min(math.ceil(self._pair(self.beta_slow, len(theta), base)), 2 * len(theta) - 1)
        pairs = torch.arange(len(theta), device=theta.device, dtype=theta.dtype)
        share = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
        return theta * (1 - share + share / self.factor)

    def _pair(self, rotations: float, pairs: int, base: float) -> float:
        """The (fractional) pair that rotates so often over the length of training."""
        return pairs * math.log(self.original_max_positions / (rotations * 2 * math.pi)) / math.log(base)

    @classmethod
    def examples(cls) -> tuple["YarnConfig", ...]:
        """Small instances that the contract tests run."""
        return (cls(factor=2.0, original_max_positions=64),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Config(RopeExtensionConfig):
    """Llama 3.1: pairs that rotate rarely over the old length are interpolated, others in part."""

    original_max_positions: int  # the length of training
    low_freq_factor: float = 1.0  # rotations over that length, up to which a pair is interpolated
    high_freq_factor: float = 4.0  # rotations, from which on a pair stays

    kind: ClassVar[str] = "llama3"
    paper: ClassVar[str] = "Grattafiori et al. 2024 (Llama 3), the code of version 3.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_max_positions < 1:
            raise InputError(f"original_max_positions: expected 1 or more, got {self.original_max_positions}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise InputError(
                f"low_freq_factor, high_freq_factor: expected 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor}, {self.high_freq_factor}"
            )

    def extended(self, theta: Tensor, base: float) -> Tensor:
        """Between the two bounds interpolation sets in evenly with the number of rotations."""
        rotations = self.original_max_positions * theta / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        stays = ((rotations - self.low_freq_factor) / width).clamp(0, 1)
        return theta * (stays + (1 - stays) / self.factor)

    @classmethod
    def examples(cls) -> tuple["Llama3Config", ...]:
        """Small instances that the contract tests run."""
        return (cls(factor=2.0, original_max_positions=64),)
