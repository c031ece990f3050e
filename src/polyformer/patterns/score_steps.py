"""Score functions in steps that have names, so that who looks at a score sees what became of it.

    @step("soft cap")
    @broadcasts
    def limit(score, b, h, q_idx, kv_idx): ...

A function of several steps is `in_turn` of them. One without a name is a step by itself.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from torch import Tensor

from polyformer.patterns.base import ScoreMod

UNNAMED = "function of the score"


def step(name: str) -> Callable[[ScoreMod], ScoreMod]:
    """Names a score function for those who look."""

    def name_it(function: ScoreMod) -> ScoreMod:
        function.step = name  # type: ignore[attr-defined]
        return function

    return name_it


@dataclasses.dataclass(frozen=True, eq=False)
class InTurn:
    """Score functions, all for indices that broadcast, each of what the one before gave."""

    mods: tuple[ScoreMod, ...]

    broadcasts: ClassVar[bool] = True

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The last one's score."""
        for mod in self.mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score


def in_turn(mods: Iterable[ScoreMod | None]) -> ScoreMod | None:
    """Those that are there, one after the other; None where there are none."""
    some = tuple(mod for mod in mods if mod is not None)
    if len(some) < 2:
        return some[0] if some else None
    return InTurn(some)


def steps_of(mod: ScoreMod | None) -> Iterator[tuple[str, ScoreMod]]:
    """The steps of a function, by name."""
    if isinstance(mod, InTurn):
        for part in mod.mods:
            yield from steps_of(part)
    elif mod is not None:
        yield getattr(mod, "step", UNNAMED), mod
