"""Frequent words: words of a made-up language with frequencies of a Zeta distribution; find the three first.

The word of rank r occurs n r^-a / zeta(a) times, rounded down. The most frequent word is dots, which do not
count. Source: Hsieh et al. 2024 (RULER), section 3, with the prompt of its appendix and a = 2.
"""

import math
import random
import string
from dataclasses import dataclass
from typing import ClassVar

from polyformer.applications.probing.base import ProbeTask, Sample

DOTS, ANSWERS = "...", 3
ZETA = math.pi**2 / 6
"""zeta(2)."""


@dataclass(frozen=True)
class FrequentWords(ProbeTask):
    """`vocabulary` words, the dots among them, of `letters` letters; the answer is the three after the dots.

    A unit is a word of the text.
    """

    vocabulary: int = 80
    letters: int = 6

    new_tokens: ClassVar[int] = 50

    @property
    def fewest(self) -> int:
        """The words from which on the last answer occurs more often than the next word, also when rounded."""
        return math.ceil(1 / (occurrences(1, ANSWERS + 1) - occurrences(1, ANSWERS + 2)))

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample."""
        words: dict[str, None] = {}
        while len(words) < self.vocabulary - 1:
            words["".join(draw.choices(string.ascii_lowercase, k=self.letters))] = None
        ranked = [DOTS, *words]
        text = [word for rank, word in enumerate(ranked, 1) for _ in range(int(occurrences(units, rank)))]
        draw.shuffle(text)
        return Sample(
            "Read the following coded text and track the frequency of each coded word. Find the three most "
            f"frequently appeared coded words. {' '.join(text)}\n"
            "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
            "most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
            tuple(ranked[1 : ANSWERS + 1]),
        )


def occurrences(units: int, rank: int) -> float:
    """Return how often the word of a rank occurs among `units` words, before rounding."""
    return units * rank**-2 / ZETA
