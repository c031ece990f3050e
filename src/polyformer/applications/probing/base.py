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

    def demonstration(self, draw: random.Random) -> str:
        """Return a small sample with its answers."""
        sample = self.sample(self.fewest, draw)
        return f"{sample.text}{sample.prefix} {', '.join(sample.answers)}"


def draw_places(places: int, count: int, draw: random.Random) -> list[int]:
    """Return `count` uniformly drawn places, different ones if there are enough."""
    return draw.sample(range(places), count) if count <= places else draw.choices(range(places), k=count)


NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
"""The sentences between which little is hidden (Mohtashami and Jaggi 2023)."""
