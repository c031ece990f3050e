"""Common words: a numbered list of words in random order; find the ten that occur most often.

Source: Hsieh et al. 2024 (RULER), section 3, with the prompt of its appendix.
"""

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from polyformer.applications.probing.base import ProbeTask, Sample
from polyformer.applications.probing.english_words import ADJECTIVES, NOUNS

SINGLE = [*ADJECTIVES, *NOUNS]


@dataclass(frozen=True)
class CommonWords(ProbeTask):
    """`count` words occur `often` times each, the others `seldom` times; a unit is such another word."""

    often: int = 30
    seldom: int = 3
    count: int = 10

    new_tokens: ClassVar[int] = 120

    @property
    def fewest(self) -> int:
        """The least number of words besides the common ones; without other words, none would be common."""
        return self.count

    @property
    def most(self) -> int:
        """The other single words, and the pairs of words that are not common."""
        return len(SINGLE) - self.count + (len(ADJECTIVES) - self.count) * (len(NOUNS) - self.count)

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample."""
        words = draw.sample(SINGLE, len(SINGLE))
        common, others = words[: self.count], words[self.count :]
        if units > len(others):
            others += _pairs(units - len(others), common, draw)
        occurrences = common * self.often + others[:units] * self.seldom
        draw.shuffle(occurrences)
        text = " ".join(f"{number}. {word}" for number, word in enumerate(occurrences, 1))
        return Sample(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize "
            f"the ones that appear most often.\n{text}\n"
            f"Question: What are the {self.count} most common words in the above list?",
            f" Answer: The top {self.count} words that appear most often in the list are:",
            tuple(common),
        )

    def demonstration(self, draw: random.Random) -> str:
        """Return RULER's: fewer occurrences, and numbered answers."""
        often, units = (3, 10) if self.seldom == 1 else (10, 30)
        sample = replace(self, often=often).sample(units, draw)
        answers = " ".join(f"{number}. {word}" for number, word in enumerate(sample.answers, 1))
        return f"{sample.text}{sample.prefix} {answers}"


def _pairs(count: int, common: list[str], draw: random.Random) -> list[str]:
    """Return different pairs of words without common words."""
    adjectives, nouns = ([word for word in words if word not in common] for words in (ADJECTIVES, NOUNS))
    numbers = draw.sample(range(len(adjectives) * len(nouns)), count)
    return [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in numbers]
