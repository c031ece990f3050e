"""Needles in a haystack: sentences with the value of a key, hidden in a long text, and a question about them.

    needle    One of the special magic numbers for amber-anchor is: 4071529.

    single        one needle
    multi-key     needles of other keys are in the way
    multi-value   a key has several values; find all
    multi-query   one question for several keys

Source: Hsieh et al. 2024 (RULER), section 3, with the prompts of its appendix. Keys, and values, of a sample
are distinct here.
"""

import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from polyformer.applications.probing.base import NOISE, ProbeTask, Sample, draw_places
from polyformer.applications.probing.english_words import ADJECTIVES, NOUNS

Haystack = Literal["noise", "text", "needles"]
Kind = Literal["words", "numbers", "uuids"]

DRAWN: Mapping[str, Callable[[random.Random], str]] = {
    "words": lambda draw: f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}",
    "numbers": lambda draw: str(draw.randrange(10**6, 10**7)),
    "uuids": lambda draw: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
}
"""By kind: a function that draws a key or a value."""

_END = re.compile(r"[.!?][\"')\]]*$")


@dataclass(frozen=True)
class Needles(ProbeTask):
    """Needles for `keys` keys with `values` values each, and a question for `queries` keys.

    haystack: the repeated sentences of `NOISE` (a unit is a line of them), words of the text `source` (a unit
    is a word), or needles of other keys (a unit is a needle).
    """

    haystack: Haystack = "noise"
    source: Sequence[str] = ()
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"

    new_tokens: ClassVar[int] = 128

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample with `units` units of hay."""
        seen: set[str] = set()
        pairs = [
            (key, self._new(self.value_kind, seen, draw))
            for key in [self._new(self.key_kind, seen, draw) for _ in range(self.keys)]
            for _ in range(self.values)
        ]
        asked = draw.sample(list(dict.fromkeys(key for key, _ in pairs)), self.queries)
        needles = [self._needle(*pair) for pair in draw.sample(pairs, len(pairs))]
        text = self._hidden(needles, units, seen, draw)
        answers = tuple(value for key in asked for name, value in pairs if name == key)
        depth = text.index(f"{asked[0]} is: ") / len(text)
        return self._question(text, asked, answers, depth)

    def _new(self, kind: Kind, seen: set[str], draw: random.Random) -> str:
        """Return a key or a value that is not in `seen`, and add it."""
        while (text := DRAWN[kind](draw)) in seen:
            pass
        seen.add(text)
        return text

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_kind} for {key} is: {value}."

    def _hidden(self, needles: list[str], units: int, seen: set[str], draw: random.Random) -> str:
        """Return the haystack with the needles between its sentences."""
        if self.haystack == "text":
            start = draw.randrange(len(self.source))
            words = [self.source[(start + i) % len(self.source)] for i in range(units)]
            sentences = _sentences(words)
            return " ".join(_inserted(sentences, needles, len(sentences) + 1, draw))
        if self.haystack == "noise":
            lines = [" ".join(NOISE)] * units
        else:
            lines = [
                self._needle(self._new(self.key_kind, seen, draw), self._new(self.value_kind, seen, draw))
                for _ in range(units)
            ]
        # RULER has no needle after the last line, where it would be next to the question.
        return "\n".join(_inserted(lines, needles, max(units, 1), draw))

    def _question(self, text: str, asked: list[str], answers: tuple[str, ...], depth: float) -> Sample:
        """Return the sample, in the singular if there is a single answer."""
        single = len(answers) == 1
        kind = self.value_kind[:-1] if single else self.value_kind
        verb, article = ("is", "A") if single else ("are", "Some")
        names = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        what = "What is the" if single else "What are all the"
        return Sample(
            f"{article} special magic {kind} {verb} hidden within the following text. Make sure to memorize "
            f"it. I will quiz you about the {kind} afterwards.\n{text}\n"
            f"{what} special magic {kind} for {names} mentioned in the provided text?",
            f" The special magic {kind} for {names} mentioned in the provided text {verb}",
            answers,
            depth,
        )


def _sentences(words: Sequence[str]) -> list[str]:
    """Return the sentences of a text; the first and the last may be incomplete."""
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if _END.search(word):
            sentences.append([])
    return [" ".join(sentence) for sentence in sentences if sentence]


def _inserted(
    sentences: Sequence[str], needles: Sequence[str], places: int, draw: random.Random
) -> list[str]:
    """Return the sentences with the needles, each before one of the first `places` sentences."""
    result = list(sentences)
    for place, needle in sorted(zip(draw_places(places, len(needles), draw), needles), reverse=True):
        result.insert(place, needle)
    return result
