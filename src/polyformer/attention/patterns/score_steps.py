"""Score functions in named steps, so that visualizations can show the score after each step.

    @step("soft cap")
    @broadcasts
    def limit(score, b, h, q_idx, kv_idx): ...

`chain_score_mods` joins several steps to one function. A function without a name is a single step.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from torch import Tensor

from polyformer.attention.patterns.base import ScoreMod

UNNAMED = "function of the score"


def step(name: str) -> Callable[[ScoreMod], ScoreMod]:
    """Return a decorator that names a score function, for visualizations."""

    def set_name(function: ScoreMod) -> ScoreMod:
        function.step = name  # type: ignore[attr-defined]
        return function

    return set_name


@dataclasses.dataclass(frozen=True, eq=False)
class ChainedScoreMods:
    """Score functions in sequence, each of the previous function's score; indices broadcast."""

    mods: tuple[ScoreMod, ...]

    broadcasts: ClassVar[bool] = True

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return the score after the last function."""
        for mod in self.mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score


def chain_score_mods(mods: Iterable[ScoreMod | None]) -> ScoreMod | None:
    """Return the functions that are not None as one function in sequence; None if there are none."""
    some = tuple(mod for mod in mods if mod is not None)
    # A single function needs no wrapper and keeps its name.
    if len(some) < 2:
        return some[0] if some else None
    return ChainedScoreMods(some)


def steps_of(mod: ScoreMod | None) -> Iterator[tuple[str, ScoreMod]]:
    """Yield the name and function of each step."""
    # Chains may be nested: yield the steps of all parts.
    if isinstance(mod, ChainedScoreMods):
        for part in mod.mods:
            yield from steps_of(part)
    elif mod is not None:
        yield getattr(mod, "step", UNNAMED), mod
