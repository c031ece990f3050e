"""The tasks of RULER (Hsieh et al. 2024, section 3): a sample of any size, drawn from a seed.

    common words         a numbered list of words in random order; find the ten that occur most often
    frequent words       words of a made-up language with frequencies of a Zeta distribution; find the three
                         first. The word of rank r occurs n r^-a / zeta(a) times, rounded down, with a = 2.
                         The most frequent word is dots, which do not count.
    variable tracking    chains of assignments hidden in a text; find all variables with one value:
                         VAR ABCDE = 71380 ... VAR FGHIJ = VAR ABCDE ... VAR KLMNO = VAR FGHIJ
    questions            a paragraph with the answer among other paragraphs, from a file in SQuAD's format
    needles              sentences with the value of a key, hidden in a long text, and a question about them:
                         One of the special magic numbers for amber-anchor is: 4071529.

        single           one needle
        multi-key        needles of other keys are in the way
        multi-value      a key has several values; find all
        multi-query      one question for several keys

Scores are exact: the answers that a generated text contains, regardless of case. Prompts are those of the
paper's appendix, for variables those of its code, including spaces and spelling, on which scores of small
models depend. The assignments of a chain are in order, and other chains may run between them. Keys, and
values, of a sample of needles are distinct here.
"""

import abc
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal


def match_all(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the text contains."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def match_any(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text contains any of the answers, otherwise 0: for several wordings of one answer."""
    return float(any(answer.lower() in text.lower() for answer in answers))


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


_ADJECTIVES = """
absent active amazing ancient angry annual awake awful basic bitter blank boring brave brief bright brisk
broad broken careful cautious cheap clean clever clumsy coarse complex cosmic crazy crisp cruel curious
curly cynical daring deadly delicate dense dizzy dramatic dreary eager early elastic elegant empty endless
equal eternal exact exotic faint fancy fatal feeble fierce final fluffy formal fragile frank fresh frozen
funny gentle genuine giant gifted global gloomy golden grand grateful greedy handy happy harsh hasty hollow
honest hostile humble hungry immense innocent jealous joyful lively local lonely lovely loyal lucky massive
mature mellow mighty minor misty modern modest muddy mutual nasty nervous noble noisy normal obedient
obvious official ordinary painful patient perfect plain pleasant polite popular precious private prompt
proper proud public puzzled quaint quick quiet rapid ready regular remote rigid rough royal rural rusty
sacred salty scarce secret selfish serious severe shallow sharp shiny silent silly simple sincere sleepy
slender smooth sober solid spare steady steep sticky stiff strange strict sturdy subtle sudden superb sweet
swift tender tense thick thirsty tough tragic tropical typical unique upset urgent useful usual vacant vague
valid violent vivid wealthy weird wicked witty wooden worried worthy young zealous
"""

_NOUNS = """
anchor apple apron arrow author autumn badger balloon bamboo banana barrel basket beacon beaver biscuit
blossom boulder bracelet branch breeze bridge broom bucket buffalo bullet butter button cabbage cabin cactus
camera candle canoe canvas canyon captain caravan carpet carrot castle cathedral ceiling cellar cement
chamber chapel cherry chimney church circle citizen clock closet clover coconut collar compass concert
cookie copper corner cottage cotton cousin cradle crayon cricket crown crystal cupboard curtain cushion
daisy dancer desert diamond dinner doctor dolphin donkey dragon drawer dresser drummer eagle earring elbow
elephant engine envelope fabric factory falcon family farmer feather fence festival fiddle finger flame
flour flower flute forest fossil fountain freezer friend garage garden garlic gazelle giraffe glacier glove
goblet gorilla granite grape guitar hammer harbor harvest hatchet helmet herring highway hockey honey hotel
hunter island ivory jacket jaguar jewel jigsaw journal jungle kernel kettle kitchen kitten ladder lantern
laundry lawyer leather lemon leopard letter library lizard lobster locker lumber machine magnet mailbox
mango maple marble market meadow medal melody mirror monkey morning mosque motor mountain muffin museum
mustard napkin needle nephew notebook nurse oasis ocean octopus office olive onion orchard orchid otter
oxygen oyster paddle palace panther parade parrot pasture peacock peanut pebble pelican pencil pepper piano
picnic pigeon pillow pioneer pirate planet plaster platform pocket polygon portrait potato powder prairie
printer prison puddle puppet pyramid quarry queen rabbit radio railway rainbow raven recipe ribbon river
robot rocket saddle sailor salmon sandal satchel saucer scarf school scissors sculptor senator shadow
shepherd shovel silver singer sister skeleton soldier spider spinach spoon squirrel stadium statue student
submarine sugar summer surgeon sweater tailor teacher temple theater thunder ticket tiger timber tomato
tortoise tower tractor treasure trumpet tulip tunnel turkey turtle umbrella uncle valley vampire vanilla
vehicle velvet village violin volcano waiter walnut walrus weasel whale wheel whistle widow window winter
wizard workshop zebra
"""

ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()


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


@dataclass(frozen=True)
class VariableTracking(ProbeTask):
    """`chains` chains, each a value and `hops` further variables; a unit is a line of `NOISE`.

    letters: of the name of a variable.
    """

    chains: int = 1
    hops: int = 4
    letters: int = 5

    new_tokens: ClassVar[int] = 30

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample about the first chain."""
        count = self.hops + 1
        names: dict[str, None] = {}
        while len(names) < self.chains * count:
            names["".join(draw.choices(string.ascii_uppercase, k=self.letters))] = None
        values = draw.sample(range(10_000, 100_000), self.chains)
        chains = [list(names)[i * count : (i + 1) * count] for i in range(self.chains)]
        # Noise and assignments, each at its place: the assignments of a chain before sorted random lines.
        parts = [(place, " ".join(NOISE) + "\n") for place in range(units)]
        for value, chain in zip(values, chains):
            places = sorted(draw_places(max(units, 1), count, draw))
            texts = [f"VAR {chain[0]} = {value}"]
            texts += [f"VAR {name} = VAR {source} " for source, name in pairwise(chain)]
            parts += [(place - 0.5, text) for place, text in zip(places, texts)]
        text = " ".join(part for _, part in sorted(parts, key=lambda part: part[0]))
        return Sample(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{text}\nQuestion: Find all variables that are assigned the value {values[0]} in the text "
            "above.",
            " Answer: According to the chain(s) of variable assignment in the text above, "
            f"{count} variables are assgined the value {values[0]}, they are:",
            tuple(chains[0]),
        )

    def demonstration(self, draw: random.Random) -> str:
        """Return a chain of shorter names in ten lines of noise."""
        sample = replace(self, letters=3).sample(10, draw)
        return f"{sample.text}{sample.prefix}  {' '.join(sample.answers)}\n\n"


ASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)


@dataclass(frozen=True)
class DistractedQuestions(ProbeTask):
    """Questions of `rows` {question, context, answers}; a unit is the paragraph of other questions.

    A generated text is right if it contains any of the human answers.
    """

    rows: Sequence[dict[str, Any]]
    paragraphs: Sequence[str]

    new_tokens: ClassVar[int] = 32
    score: Callable[[str, Sequence[str]], float] = staticmethod(match_any)

    @property
    def most(self) -> int:
        """The paragraphs besides the right paragraph."""
        return len(self.paragraphs) - 1

    def sample(self, units: int, draw: random.Random) -> Sample:
        """Return a sample; the paragraphs are in random order."""
        row = draw.choice(self.rows)
        order = draw.sample(self.paragraphs, len(self.paragraphs))
        chosen = [text for text in order if text != row["context"]][:units]
        place = draw.randint(0, len(chosen))
        chosen.insert(place, row["context"])
        text = "\n\n".join(f"Document {number}:\n{document}" for number, document in enumerate(chosen, 1))
        return Sample(
            f"{ASK}\n\nThe following are given documents.\n\n{text}\n\n{ASK}\n\nQuestion: {row['question']}",
            " Answer:",
            tuple(dict.fromkeys(row["answers"]["text"])),
            place / max(1, len(chosen) - 1),
        )


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
