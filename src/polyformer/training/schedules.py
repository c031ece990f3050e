"""Learning-rate schedules: pure functions of the step.

`factor(step, steps)` multiplies the optimizer's `lr` at update number `step` (the first is 1) of `steps`.
There is no state to save or restore. As a torch scheduler:
`LambdaLR(optimizer, lambda done: schedule.factor(done + 1, steps))`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from polyformer.core.config import Config
from polyformer.core.ranges import NonNegativeInt, PositiveInt, UnitFloat


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """Base of the schedules: a linear warm-up over the first `warmup` steps, then `decay`."""

    option: ClassVar[str] = "schedule.kind"

    warmup: NonNegativeInt = 0  # steps until the factor is 1

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of `lr` at update `step` (1 is the first) of `steps`."""
        return step / self.warmup if step < self.warmup else self.decay(step, steps)

    def decay(self, step: int, steps: int) -> float:
        """Return the factor at a `step` after the warm-up."""
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """Return the completed fraction of the steps after the warm-up: 1 from the last step on."""
        return min(1.0, (step - self.warmup) / max(1, steps - self.warmup))


@dataclass(frozen=True, kw_only=True)
class Constant(ScheduleConfig):
    """Constant schedule: the learning rate stays at `lr` after the warm-up."""

    kind: ClassVar[str] = "constant"

    def decay(self, step: int, steps: int) -> float:
        """Return 1 at every step."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DecayToFloor(ScheduleConfig):
    """Base of the schedules that end at `floor` times the peak."""

    floor: UnitFloat = 0.0  # factor at the last step


@dataclass(frozen=True, kw_only=True)
class Linear(DecayToFloor):
    """Linear schedule: the learning rate decays linearly to `floor` of its peak."""

    kind: ClassVar[str] = "linear"
    paper: ClassVar[str] = "Devlin et al. 2019 (BERT), A.2"

    def decay(self, step: int, steps: int) -> float:
        """Return 1 - (1 - floor) * progress."""
        return 1.0 - (1.0 - self.floor) * self.progress(step, steps)


@dataclass(frozen=True, kw_only=True)
class Cosine(DecayToFloor):
    """Cosine schedule: the learning rate decays along half a cosine to `floor` of its peak."""

    kind: ClassVar[str] = "cosine"
    paper: ClassVar[str] = "Loshchilov and Hutter 2017 (SGDR), equation 5, one period"

    floor: UnitFloat = 0.1

    def decay(self, step: int, steps: int) -> float:
        """Return floor + (1 - floor) * (1 + cos(pi * progress)) / 2."""
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * self.progress(step, steps)))


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(ScheduleConfig):
    """Inverse square root: the learning rate rises linearly, then decays as 1 / sqrt(step).

    min(step / warmup, sqrt(warmup / step)): `lr` is the peak, reached at step `warmup`.
    """

    kind: ClassVar[str] = "inverse-sqrt"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 5.3, equation 3, divided by its peak"

    warmup: int = 4000

    def decay(self, step: int, steps: int) -> float:
        """Return sqrt(warmup / step)."""
        return math.sqrt(max(1, self.warmup) / step)


@dataclass(frozen=True, kw_only=True)
class Noam(ScheduleConfig):
    """Noam schedule: linear warm-up, then 1 / sqrt(step), scaled by the hidden size.

    hidden_size^-0.5 * min(step^-0.5, step * warmup^-1.5): the learning rate of the paper if `lr` is 1.
    """

    kind: ClassVar[str] = "noam"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 5.3, equation 3"

    hidden_size: PositiveInt
    warmup: PositiveInt = 4000

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return an example with a hidden size, which has no default."""
        return (cls(hidden_size=512),)

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate of the paper, which includes the warm-up."""
        return self.hidden_size**-0.5 * min(step**-0.5, step * self.warmup**-1.5)
