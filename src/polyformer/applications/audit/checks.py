"""A check: a measurement of a model on an input of chosen sizes, and the search for the smallest input."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyformer.applications.audit.subject import NotApplicableError, Subject
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


class Check(NamedTuple):
    """A contract: its name, the sentence of a finding, and `measure(subject, **sizes)`.

    starts: the sizes to measure, from the length. least: the smallest sizes. whole_rows: the check makes
    sense for outputs of whole rows and inputs without tokens too.
    """

    name: str
    sentence: str
    measure: Callable[..., Gap]
    starts: Callable[[int], list[dict[str, int]]]
    least: Sizes
    whole_rows: bool

    def __call__(self, subject: Subject, sizes: Sizes) -> Gap:
        """Measure; a call that raises is an infinite difference.

        Raises `NotApplicableError` with the reason if the check does not concern the model.
        """
        if not self.whole_rows and subject.fixed:
            raise NotApplicableError("the input has no tokens")
        if not self.whole_rows and not subject.per_token:
            raise NotApplicableError("the model has no output for each token")
        try:
            return self.measure(subject, **sizes)
        except NotApplicableError:
            raise
        except (InputError, NotImplementedError) as error:
            raise NotApplicableError(f"the model refuses: {error}") from error
        except Exception as error:  # of any model
            return Gap(float("inf"), 0.0, f"the call raises {type(error).__name__}: {str(error)[:200]}")


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(
    name: str,
    sentence: str,
    starts: Callable[[int], list[dict[str, int]]],
    least: Sizes,
    whole_rows: bool = False,
) -> Callable[[Callable[..., Gap]], Callable[..., Gap]]:
    """Register a function from a subject and sizes to a `Gap`."""

    def register(measure: Callable[..., Gap]) -> Callable[..., Gap]:
        CHECKS[name] = Check(name, sentence, measure, starts, least, whole_rows)
        return measure

    return register


def shrink(check: Check, subject: Subject, sizes: Sizes, gap: Gap) -> tuple[dict[str, int], Gap]:
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
                result = _measured(check, subject, sizes)
                if result is not None and result.exceeds and (result.figure == float("inf")) == fails:
                    best, gap, changed = sizes, result, True
                    break
    return best, gap


def _measured(check: Check, subject: Subject, sizes: Sizes) -> Gap | None:
    try:
        return check(subject, sizes)
    except NotApplicableError:
        return None


def find(check: Check, subject: Subject) -> tuple[dict[str, Any], Gap]:
    """Return the first sizes with a finding, made small; or the sizes of the greatest difference."""
    worst: tuple[dict[str, int], Gap] | None = None
    for sizes in check.starts(subject.length):
        gap = check(subject, sizes)
        if gap.exceeds:
            return shrink(check, subject, sizes, gap)
        if worst is None or gap.figure > worst[1].figure:
            worst = sizes, gap
    assert worst is not None
    return worst
