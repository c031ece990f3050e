"""Rules that can fail, and records that follow from figures: neither is evidence without the other."""

import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote
from polyformer_lab.catalogue import Recorded
from polyformer_lab.expression import Array, Lookup, evaluate
from polyformer_lab.results import Results
from polyformer_lab.study import Claim, Study

TRIALS = 200
"""Invented results for which a rule is evaluated."""

LABELS = 4
"""Labels of an axis that only the measurement knows."""

COUNTS = {"one seed": 1, "two seeds": 2, "three seeds": 3, "four seeds": 4, "five seeds": 5}
UNEQUAL = re.compile(r"\bseed \d+: \d+|\bseeds? \d+ (?:has|had|with) ")
"""Words of a scale for a seed whose runs are shorter or longer than those of the others."""


def check_rules(study: Study) -> None:
    """Raise `InputError` for a rule that is no expression of figures, or that no figures contradict."""
    for name, claim in study.claims.items():
        trials = (Invented(len(study.seeds), trial) for trial in range(TRIALS if claim.holds else 1))
        if not any(is_contradicted(claim, figures) for figures in trials) and claim.holds:
            raise InputError(
                f"claims.{name}.holds: {quote('; '.join(claim.holds))} is true for all figures; "
                "state a condition that some results contradict"
            )


def is_contradicted(claim: Claim, figures: Lookup) -> bool:
    """Return whether figures contradict the rule of a claim; those that cannot decide do not.

    The measurement may have other labels than invented figures. An expression that needs them counts as a
    contradiction, since nothing is known of it. Raises `InputError` for any other expression without a value.
    """
    defined: dict[str, Any] = {}
    unknown = False

    def value(text: object) -> Any:
        nonlocal unknown
        try:
            return evaluate(str(text), figures, defined)
        except InputError as error:
            if not isinstance(error.__cause__, ValueError | IndexError):  # another number of labels
                raise
            unknown = True
            return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scipy about invented figures
        for name, text in claim.define.items():
            if (number := value(text)) is not None:
                defined[name] = number
        shown, holds = ([value(text) for text in texts] for texts in (claim.shown, claim.holds))
    return unknown or (all(map(np.all, shown)) and not all(map(np.all, holds)))


class Invented:
    """Figures for any metric and labels, by seed: the same for the same names in a trial.

    They have both signs, several magnitudes and no relation to each other, so that nearly all of them
    contradict most rules.
    """

    def __init__(self, seeds: int, trial: int):
        self.seeds, self.trial = max(1, seeds), trial

    def __call__(self, metric: str, labels: tuple[Any, ...]) -> Array:
        places = [place for place, label in enumerate(labels) if isinstance(label, slice)]
        if not places:
            return self.figures(metric, tuple(map(str, labels)))
        own = tuple(str(label) for label in labels)
        return np.stack([self.figures(metric, (*own, str(number))) for number in range(LABELS)])

    def figures(self, metric: str, labels: tuple[str, ...]) -> Array:
        """Return numbers of the metric's magnitude and sign in this trial, different for each cell."""
        of_metric, of_cell = (
            np.random.default_rng([self.trial, zlib.crc32(repr(key).encode())])
            for key in (metric, (metric, labels))
        )
        size = 10.0 ** of_metric.uniform(-3, 3) * of_metric.choice([-1, 1, 1, 1])
        between, within = of_metric.choice([0.02, 0.3, 1.0], 2)
        return size * (1 + between * of_cell.normal() + within * of_cell.normal(size=self.seeds))


def find_faults(study: Study, results: Results, records: Mapping[str, Recorded]) -> Iterator[str]:
    """Yield a line for each claim whose record differs from the recorded figures of its study."""
    for name, claim in study.claims.items():
        record, verdict = records[name], results.verdict(claim)
        if verdict is None:
            yield f"{name}: no verdict; {results.absent[claim.claim]} was not recorded"
            continue
        if verdict.outcome != record.verdict:
            yield f"{name}: the record says {record.verdict!r}; {verdict.text}"
        seeds = len(results.seeds)
        if record.seeds not in (None, 0, seeds):
            yield f"{name}: the record says {record.seeds} seeds, the figures are of {seeds}"
        stated = [count for words, count in COUNTS.items() if words in claim.scale]
        if record.seeds is not None and stated not in ([], [record.seeds]):
            yield f"{name}: the scale says {stated[0]} seeds, the record {record.seeds}"
        if UNEQUAL.search(claim.scale):
            yield f"{name}: the scale has runs of other lengths: {claim.scale}"
