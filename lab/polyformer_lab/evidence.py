"""Rules that can fail, and records that follow from figures: neither is evidence without the other."""

import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote
from polyformer_lab.catalogue import Recorded
from polyformer_lab.expression import Array, evaluate
from polyformer_lab.results import Results, check_rule
from polyformer_lab.study import Claim, Study

TRIALS = 200
"""Invented results for which a rule is evaluated."""

LABELS = 4
"""Labels of an axis that only the measurement knows."""

COUNTS = {"one seed": 1, "two seeds": 2, "three seeds": 3, "four seeds": 4, "five seeds": 5}
UNEQUAL = re.compile(r"\bseed \d+: \d+|\bseeds? \d+ (?:has|had|with) ")
"""Words of a scale for a seed whose runs are shorter or longer than those of the others."""


def can_fail(study: Study, claim: Claim) -> bool:
    """Return whether some results contradict a claim's rule.

    The rule is evaluated on invented figures of both signs, several magnitudes and no relation to each other:
    most rules are contradicted by nearly all of them.
    """
    try:
        return any(_contradicted(study, claim, trial) for trial in range(TRIALS))
    except InputError as error:
        if isinstance(error.__cause__, ValueError | IndexError):  # the measurement has other labels
            return True
        raise


def check_rules(study: Study) -> None:
    """Raise `InputError` for a rule that is no expression of figures, or that no figures contradict."""
    for name, claim in study.claims.items():
        check_rule(claim)
        if claim.holds and not can_fail(study, claim):
            raise InputError(
                f"claims.{name}.holds: {quote('; '.join(claim.holds))} is true for all figures; "
                "state a condition that some results contradict"
            )


def _contradicted(study: Study, claim: Claim, trial: int) -> bool:
    """Return whether invented figures contradict the rule; those that cannot decide do not."""
    lookup = _Invented(study, trial)
    defined: dict[str, Any] = {}
    with np.errstate(all="ignore"):
        for name, text in claim.define.items():
            defined[name] = evaluate(str(text), lookup, defined)
        shown, holds = (
            all(bool(np.all(evaluate(text, lookup, defined))) for text in texts)
            for texts in (claim.shown, claim.holds)
        )
    return shown and not holds


class _Invented:
    """Figures for any metric and labels by seed: the same for the same names."""

    def __init__(self, study: Study, trial: int):
        self.seeds, self.trial = max(1, len(study.seeds)), trial

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
