"""A check: a measurement of a model on an input of chosen sizes, and the search for the smallest input."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from polyformer.applications.audit.subject import NotApplicableError, Subject, distance
from polyformer.core.errors import InputError

Sizes = Mapping[str, int]

EVALUATIONS = 60
"""The most measurements in the search for a smaller input."""


class Gap(NamedTuple):
    """A difference that should be 0, and the largest that rounding explains; `note`: a remark on it."""

    figure: float
    limit: float
    note: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether the difference is a finding; NaN is."""
        return not self.figure <= self.limit


Measure = Callable[..., Gap | tuple[Tensor, Tensor]]
"""A function from a subject and sizes to a gap, or to two outputs that are equal up to rounding."""

Starts = Callable[[int], Iterable[tuple[int, ...]]]
"""A function from the length to the sizes to measure, in the order of the measurement's arguments."""


class Check(NamedTuple):
    """A contract: its name, the sentence of a finding, and the measurement.

    least: the smallest sizes. whole_rows: the check makes sense for outputs of whole rows and inputs without
    tokens too.
    """

    name: str
    sentence: str
    measure: Measure
    starts: Starts
    least: Sizes
    whole_rows: bool

    def __call__(self, subject: Subject, sizes: Sizes) -> Gap:
        """Measure; a call that raises is an infinite difference.

        Raises `NotApplicableError` with the reason if the check does not concern the model.
        """
        if not self.whole_rows and not subject.per_token:
            what = "the input has no tokens" if subject.fixed else "the model has no output for each token"
            raise NotApplicableError(what)
        try:
            result = self.measure(subject, **sizes)
        except NotApplicableError:
            raise
        except (InputError, NotImplementedError) as error:
            raise NotApplicableError(f"the model refuses: {error}") from error
        except Exception as error:  # of any model
            return Gap(float("inf"), 0.0, f"the call raises {type(error).__name__}: {str(error)[:200]}")
        return result if isinstance(result, Gap) else Gap(distance(*result), subject.rounding)


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(
    sentence: str, starts: Starts, *, name: str = "", whole_rows: bool = False, gradients: bool = False
) -> Callable[[Measure], Measure]:
    """Register a measurement under its name; the defaults of its arguments are the smallest sizes."""

    def register(measure: Measure) -> Measure:
        own = name or measure.__name__.replace("_", " ")
        defaults = {key: each.default for key, each in inspect.signature(measure).parameters.items()}
        least = {key: value for key, value in defaults.items() if isinstance(value, int)}
        run = measure if gradients else torch.no_grad()(measure)
        CHECKS[own] = Check(own, sentence, run, starts, least, whole_rows)
        return measure

    return register


def find(check: Check, subject: Subject) -> tuple[Sizes, Gap]:
    """Return the first sizes with a finding, made small; or the sizes of the greatest difference."""
    measured: list[tuple[Sizes, Gap]] = []
    for values in check.starts(subject.length):
        sizes = dict(zip(check.least, values, strict=True))
        gap = check(subject, sizes)
        if gap.exceeds:
            return shrink(check, subject, sizes, gap)
        measured.append((sizes, gap))
    return max(measured, key=lambda pair: pair[1].figure)


def shrink(check: Check, subject: Subject, sizes: Sizes, gap: Gap) -> tuple[Sizes, Gap]:
    """Return the smallest sizes with a finding of the same kind, a difference or a failed call."""
    best, evaluations, changed = dict(sizes), 0, True
    fails = gap.figure == float("inf")
    while changed:
        changed = False
        for name, least in check.least.items():
            size = best[name]
            tries = {least, least + 1, least + 2, size // 4, size // 2, size - 1}
            for smaller in sorted(n for n in tries if least <= n < size):
                evaluations += 1
                if evaluations > EVALUATIONS:
                    return best, gap
                sizes = best | {name: smaller}
                with contextlib.suppress(NotApplicableError):
                    result = check(subject, sizes)
                    if result.exceeds and (result.figure == float("inf")) == fails:
                        best, gap, changed = sizes, result, True
                        break
    return best, gap
