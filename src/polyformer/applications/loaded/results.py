"""The results of a loaded model: small values with names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self


@dataclass(frozen=True)
class Prediction:
    """The most probable label of an input, and the probability (0 to 1) of every label by its name.

    The probabilities sum to 1, except for a checkpoint with several labels per text (multi_label), in which
    every label has a probability of its own.
    """

    label: str
    probability: float
    probabilities: dict[str, float]

    @classmethod
    def of(cls, probabilities: Mapping[str, float]) -> Self:
        """Return the prediction with these probabilities; of equal labels the first is predicted."""
        label = max(probabilities, key=lambda name: probabilities[name])
        return cls(label, probabilities[label], dict(probabilities))


@dataclass(frozen=True)
class Choice:
    """The most probable choice, and the probability (0 to 1) of every choice in the order of the choices."""

    choice: str
    probability: float
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, choices: Sequence[str], probabilities: Sequence[float]) -> Self:
        """Return the choice with these probabilities; of equal choices the first."""
        best = max(range(len(choices)), key=probabilities.__getitem__)
        return cls(choices[best], probabilities[best], tuple(probabilities))


class TaggedWord(NamedTuple):
    """A word and its tag."""

    word: str
    tag: str
