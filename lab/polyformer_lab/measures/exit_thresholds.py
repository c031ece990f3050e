"""Exit thresholds of a translation model chosen on the validation set (Elbayad et al. 2020, section 5)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyformer.applications.exits import generate_texts, translation_generator
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig
from polyformer.training.tasks import Translation
from polyformer_lab.cells import Cell, Row, measurement

Thresholds = float | tuple[float, ...]
"""One threshold for all exits, or a threshold for each."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of a way to translate: BLEU, layers per token, and seconds."""

    bleu: float
    layers: float
    seconds: float = 0.0


@measurement("way")
def exit_thresholds(
    cell: Cell, thresholds: Sequence[float], sweeps: int, sentences: int, margin: float
) -> Iterator[Row]:
    """Yield BLEU and layers of the test sentences for each way to translate.

    The ways are the `whole` model, the `threshold` for all exits and the `thresholds` for each exit that
    validation chooses, and all tokens leaving `after` the same layer, which is a smaller depth that is fixed
    beforehand. If no threshold is within the margin, the row `threshold` has no figures.

    Args:
        cell: the cell.
        thresholds: the candidates.
        sweeps: passes over the exits, to choose a threshold for each.
        sentences: the most sentences of validation and test.
        margin: BLEU that may be lost in validation.
    """
    fitted = cell.fitted
    task, model, splits = fitted.task, fitted.model, fitted.splits
    assert isinstance(task, Translation)
    validation, test = (
        [dict(row) for row in itertools.islice(rows or (), sentences)]
        for rows in (splits.validation, splits.test)
    )

    def tried(values: Thresholds) -> Scores:
        return scores(task, model, validation, values)

    whole = scores(task, model, test, None)
    yield {"way": "whole", **dataclasses.asdict(whole)}
    least = scores(task, model, validation, None).bleu - margin
    searched = {threshold: tried(threshold) for threshold in thresholds}
    chosen = choose(searched, least)
    exits = round(whole.layers) - 1
    if chosen is None:
        yield {"way": "threshold", "bleu": None, "layers": None}
    else:
        own = each((chosen,) * exits, searched[chosen], thresholds, sweeps, tried, least)
        for way, values in (("threshold", chosen), ("thresholds", own)):
            text = " ".join(map(str, values if isinstance(values, tuple) else (values,)))
            measured = dataclasses.asdict(scores(task, model, test, values))
            yield {"way": way, **measured, "chosen": text}
    for layer in range(1, exits + 1):
        at = tuple(float(exit != layer) for exit in range(1, exits + 1))
        yield {"way": f"after {layer}", **dataclasses.asdict(scores(task, model, test, at))}


def scores(
    task: Translation, model: Any, rows: Sequence[Mapping[str, str]], thresholds: Thresholds | None
) -> Scores:
    """Return the scores of greedy translations with exits at the thresholds; None for the whole model."""
    import sacrebleu

    sources, references = ([row[side] for row in rows] for side in ("source", "target"))
    result = generate_texts(model, translation_generator(Greedy(task), sources), thresholds)
    return Scores(sacrebleu.corpus_bleu(result.texts, [references]).score, result.layers, result.seconds)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A task that translates greedily, without beam search."""

    task: Translation

    def translate(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """Return the translation of each text."""
        return self.task.translate(model, texts, BeamConfig(num_beams=1))


def choose(searched: Mapping[float, Scores], least: float) -> float | None:
    """Return the threshold with the fewest layers and a BLEU of at least `least`, or None."""
    good = [(value.layers, threshold) for threshold, value in searched.items() if value.bleu >= least]
    return min(good)[1] if good else None


def each(
    start: tuple[float, ...],
    value: Scores,
    thresholds: Sequence[float],
    sweeps: int,
    tried: Callable[[Thresholds], Scores],
    least: float,
) -> tuple[float, ...]:
    """Return a threshold for each exit.

    It starts from `start`, which has the scores `value`, and sets exit by exit the threshold with the fewest
    layers and a BLEU of at least `least`, with the other thresholds unchanged.
    """
    best = start
    for number in list(range(len(start))) * sweeps:
        for threshold in thresholds:
            others = (*best[:number], threshold, *best[number + 1 :])
            if others == best:
                continue
            other = tried(others)
            if other.bleu >= least and other.layers < value.layers:
                best, value = others, other
    return best
