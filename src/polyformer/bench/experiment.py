"""What a module of `bench/reproduce` says of itself: its claims, the data it needs, what came of a run."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.config import Config
from polyformer.core.files import read_json, write_json

REPRODUCED, DIFFERS, UNSHOWN = OUTCOMES = "reproduced", "not reproduced", "not at this scale"
"""What a verdict may be; the last where a run could not show it either way."""

RECORD = "claim.json"
"""The file in a run's folder that says what came of it."""

SOURCES = {
    "wikitext2": "WikiText-2: a directory with {train,valid,test}.txt[.gz]",
    "sst2": "SST-2: a directory with {train,test}.tsv[.gz]: text, label",
    "imdb": "IMDB: a directory with {train,test}.tsv[.gz]: label, rating, text",
    "multi30k": "Multi30k: a directory with {train,val,test_2016_flickr}.{en,de}.gz",
    "book": "a book with chapters: a text file, book.txt[.gz]",
    "decoder": "the folder of a checkpoint that writes, with rotary positions",
    "encoder": "the folder of an encoder of sentences",
    "exits": "the folder of a checkpoint with exits (polyformer convert --depth exits(...) --fit)",
}
"""Data sets and checkpoints that claims need, by the name of their folder."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A published claim and how it is judged, said before any run."""

    name: str
    says: str
    paper: str
    section: str
    published: str  # what the paper measured
    measured: str  # what is measured here
    scale: str  # the sizes here
    rule: str  # from figures to the verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What one module measures.

    sources: by setting, the name in `SOURCES` of what it takes. quick: settings of a run that takes seconds,
    to see that every path works. alone: its times are worth nothing beside other runs.
    """

    claims: tuple[Claim, ...]
    quick: Mapping[str, Any]
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alone: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`outcome`: of `OUTCOMES`. `text`: the sentence that is printed, with the figures."""

    outcome: str
    text: str

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES


def verdict_of(holds: bool, text: str) -> Verdict:
    """Reproduced or not, with the sentence that says so."""
    return Verdict(REPRODUCED if holds else DIFFERS, text)


def joined(verdicts: Sequence[Verdict], text: str) -> Verdict:
    """Of several runs: reproduced where all say so, not where any says that it is not."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return Verdict(next((each for each in (DIFFERS, UNSHOWN) if each in outcomes), REPRODUCED), text)


def conclude(experiment: Experiment, config: Config, verdicts: Iterable[Verdict | None]) -> None:
    """Print the verdict of each claim, in their order, and write them into the folder `config.out`.

    None: the run's settings leave this claim out.
    """
    outcomes: dict[str, dict[str, str]] = {}
    for claim, verdict in zip(experiment.claims, verdicts, strict=True):
        if verdict is not None:
            print(verdict.text, flush=True)
            outcomes[claim.name] = dataclasses.asdict(verdict)
    settings = config.to_dict()
    write_json(Path(settings["out"]) / RECORD, {"settings": {**settings, "out": None}, "verdicts": outcomes})


def concluded(folder: Path) -> dict[str, Any] | None:
    """What `conclude` wrote: settings, and verdicts by claim; None where no run came to its end."""
    return read_json(folder / RECORD, dict) if (folder / RECORD).is_file() else None
