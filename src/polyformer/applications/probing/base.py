"""The interface of the tasks: a sample of any size, drawn from a seed."""

import abc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyformer.applications.probing.scoring import match_all


@dataclass(frozen=True)
class Sample:
    """A text with a question, the beginning of the answer, and the answers to find.

    depth: place of the first answer in the text, from 0 (its start) to 1; None if the answers have no place.
    """

    text: str
    prefix: str
    answers: tuple[str, ...]
    depth: float | None = None

    @property
    def solution(self) -> str:
        """The sample with its answers, as a demonstration."""
        return f"{self.text}{self.prefix} {', '.join(self.answers)}"


class ProbeTask(abc.ABC):
    """A task with a number of units in its text, such as sentences, so that it fills any length.

    new_tokens: tokens that a model may generate. score: the share of the answers that a text contains.
    """

    new_tokens: ClassVar[int]
    score: Callable[[str, Sequence[str]], float] = staticmethod(match_all)

    @property
    def fewest(self) -> int:
        """The fewest units that a sample can have."""
        return 0

    @property
    def most(self) -> int | None:
        """The most units that a sample can have; None without a limit."""
        return None

    @abc.abstractmethod
    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample; equal generators give the same question at every number of units."""


NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""The sentences between which little is hidden (Mohtashami and Jaggi 2023)."""
