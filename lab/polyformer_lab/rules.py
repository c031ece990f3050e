"""The rules of a study: their names are checked before any training, and every rule must be able to fail.

A typo is refused with the nearest names. Labels are checked for every study. The names of metrics are known
for the measurement `scores`, from the tasks of the runs; those of another measurement are known after its
first cell.

Rules that can fail, and records that follow from figures: neither is evidence without the other.
"""

import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote, unknown
from polyformer.data import TokenizerConfig, load
from polyformer.training.recipes import Recipe
from polyformer.training.recipes.fit import own_data, resolve_recipe
from polyformer_lab.catalogue import Recorded
from polyformer_lab.cells import MEASURES, Cell, function_of, levels
from polyformer_lab.costs import COSTS
from polyformer_lab.expression import Array, Lookup, evaluate, references
from polyformer_lab.results import Results, within
from polyformer_lab.study import MEASURE, Claim, Study, same_label

SIZES = ("training.loss", "parameters", "layer_parameters", "seconds", *COSTS)
"""The metrics of the measurement `scores` that do not depend on the task."""

USUAL = ("validation.loss", "test.loss")
"""Metrics of nearly all tasks, for which no data are read in advance."""

SPLITS = ("validation.", "test.")
"""What the names of a task's metrics start with."""

SCORES, KIND = "scores", f"{MEASURE}.kind"
"""The default measurement, and the change of a grid that names another."""

Reference = tuple[str, str, tuple[Any, ...]]
"""An expression of a rule, and a metric in it with its labels."""


def rule_references(study: Study) -> Iterator[Reference]:
    """Yield all metrics in the rules of a study, in order; raise `InputError` for a malformed expression."""
    for claim in study.claims.values():
        defined: set[str] = set()
        for name, text in claim.define.items():
            yield from ((str(text), *own) for own in references(str(text), defined))
            defined.add(name)
        for text in (*claim.shown, *claim.holds):
            yield from ((text, *own) for own in references(text, defined))


def check_labels(study: Study) -> None:
    """Raise `InputError` for a rule with labels that the grid does not have, or with too few or too many.

    The study is the whole study; its short run may have a smaller grid.
    """
    grid = {axis: [*map(str, levels(own))] for axis, own in study.grid.items()}
    _check_plot(study)
    most = len(grid) + len(_measured_axes(study))
    for text, metric, labels in rule_references(study):
        if not len(grid) <= len(labels) <= most:
            raise _wrong_number(study, text, metric, labels)
        for label, (axis, known) in zip(labels, grid.items()):
            if isinstance(label, slice):
                if not any(within(own, label) for own in known):
                    bounds = f"{label.start or ''}:{label.stop or ''}"
                    raise InputError(
                        f"{quote(text)}: no label of {axis} lies within {bounds}; it has {', '.join(known)}"
                    )
            elif same_label(label, known) is None:
                raise InputError(f"{quote(text)}: {unknown(f'label of {axis}', label, known)}")


def _check_plot(study: Study) -> None:
    """Raise `InputError` if the x of the plot is neither an axis nor may be a metric."""
    axes = (*study.axes, *_measured_axes(study))
    if study.plot is None or study.plot.x in axes or study.measure["kind"] != SCORES:
        return
    if study.plot.x not in SIZES and not study.plot.x.startswith(SPLITS):
        raise InputError(f"plot: {unknown('axis or metric', study.plot.x, (*axes, *SIZES, *USUAL))}")


def _measured_axes(study: Study) -> tuple[str, ...]:
    """Return the axes that the measurement adds; as many as any measurement of the grid has."""
    changes = [change or {} for own in study.grid.values() for change in levels(own).values()]
    kinds = [study.measure["kind"], *(each[KIND] for each in changes if KIND in each)]
    return max((function_of(kind, MEASURES).index for kind in kinds), key=len)


def _wrong_number(study: Study, text: str, metric: str, labels: Sequence[object]) -> InputError:
    axes = ", ".join((*study.axes, *_measured_axes(study)))
    if labels:
        return InputError(f"{quote(text)}: {metric} has {len(labels)} labels; expected those of {axes}")
    defined = {name for claim in study.claims.values() for name in claim.define}
    close = unknown("name", metric, {*defined, *SIZES, *USUAL})
    return InputError(f"{quote(text)}: {close} A metric has the labels of {axes} in brackets")


def check_metrics(study: Study, cells: Sequence[Cell]) -> None:
    """Raise `InputError` for the name of a metric that no cell will have, before the first run.

    Checked are the rules, `metrics` and `plot`, for cells with the measurement `scores` and tasks
    with metrics known in advance; metrics of generated texts are not.
    """
    wanted = {metric: quote(text) for text, metric, _ in rule_references(study)}
    wanted |= dict.fromkeys(study.metrics, "metrics")
    if study.plot is not None:
        wanted[study.plot.y] = "plot"
    strange = [name for name in wanted if name not in (*SIZES, *USUAL)]
    if not strange or any(cell.kind != SCORES or cell.recipe is None for cell in cells):
        return
    known = {*SIZES}
    for recipe in _different_tasks(cells):
        names = task_metrics(recipe)
        if names is None:
            return
        known |= names
    for name in strange:
        if name not in known:
            raise InputError(f"{wanted[name]}: {unknown('metric or name', name, known)}")


def _different_tasks(cells: Sequence[Cell]) -> list[Recipe]:
    """Return a recipe for each combination of task and data."""
    recipes = [Recipe.from_dict(cell.recipe) for cell in cells if cell.recipe is not None]
    return [*{repr((each.task, each.data)): each for each in recipes}.values()]


def task_metrics(recipe: Recipe) -> set[str] | None:
    """Return the metrics of a run by split, such as "validation.accuracy", from its data and without a model.

    None for a task with metrics of generated texts, and where the data cannot be read: the run will say why.
    The tokenizer is one of bytes, since training the real one takes time and changes no names.
    """
    try:
        splits = own_data(recipe) or load(recipe.data, recipe.task.needs)
        config = resolve_recipe(recipe, splits).task
        bytes_only = TokenizerConfig(algorithm="bytes")
        task = config.build(config.tokenizer(bytes_only, splits.train) if config.tokenized else None)
        if task.finishes:
            return None
        held = {"validation": splits.validation, "test": splits.test}
        counts = {name: task.rows.held_out(rows).counts for name, rows in held.items() if rows is not None}
    except InputError:
        return None
    return {f"{split}.{name}" for split, own in counts.items() for name in _metric_names(task, own)}


def _metric_names(task: Any, counts: Mapping[str, float]) -> list[str]:
    """Return the names of a task's metrics, computed from sums of 1."""
    return [*task.metrics.values([1.0] * task.metrics.sums, dict(counts))]


def first_row_note(study: Study, metrics: Sequence[str]) -> str:
    """Return a remark on names that the rows of the first finished cell lack; "" for none."""
    missing = [name for _, name, _ in rule_references(study) if name not in metrics]
    if not missing:
        return ""
    return f"note: {unknown('metric or name in the first run', missing[0], metrics)}"


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
