"""Every mechanism, pattern, position scheme, memory and depth at one budget: its answers and its cost.

A row of the table is compared by the nats of one kind of question (`Row.asks`), seed by seed. The scale is
the distance between the means of two rows: *dense* is softmax attention to every token, and the *control* is
the same model without access to the answer: for mechanisms, patterns and depth `Window(8)`, which reaches 16
tokens in two layers; for position schemes no positions; for memories segments read without a memory (dense
has the same positions); for an image the last pixels. A seed closes the share (control - nats) / (control -
dense) of it.

- *as dense*: every seed closes at least 0.9;
- *as the control*: every seed closes at most 0.1;
- *better than dense*: every seed closes at least 1.1; *worse than the control*: every seed at most -0.1;
- *between*: anything else, including seeds that disagree.

If dense is not half a nat better than the control (for pixels, a twentieth of a nat) there is no verdict.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyformer.core.files import read_json, write_json
from polyformer_lab.cells import Cell, Row, axis, measurement
from polyformer_lab.members import trial
from polyformer_lab.members.listing import Row as Member
from polyformer_lab.members.listing import Table, every_row, fitted, references
from polyformer_lab.members.trial import Budget, Rows, refusal, train

TRAIN, HELD_OUT = 400_000, 50_000
"""The number of letters of the text."""

HELD_OUT_SEED = 99_991
IMAGES = 10_000

SCORES = "scores.json"
"""The scores of a cell by seed, which the cells that are compared with it read."""

ALIKE = 0.1
LEAST = {"recall": 0.5, "back": 0.5, "pixel": 0.05}


@axis
def members(words: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return all rows of the table, or the rows with a word in their name and their references."""
    chosen = [row for row in every_row() if not words or any(word in row.name for word in words)]
    rows = dict.fromkeys(row for own in chosen for row in (own, *_partners(own).values()))
    rows |= dict.fromkeys(row for own in [*rows] for row in _partners(own).values())
    return {row.label: _changes(row) for row in rows}


def _partners(row: Member) -> dict[str, Member]:
    """Return the rows by their part in the comparison: none for a control, the control for dense."""
    dense, control = references(row)
    return {} if row == control else {"control": control} | ({} if row == dense else {"dense": dense})


def _changes(row: Member) -> dict[str, Any]:
    own = {
        **dataclasses.asdict(row),
        **{part: f"$cell({other.label})" for part, other in _partners(row).items()},
    }
    return {f"measure.{name}": value for name, value in own.items()}


@measurement()
def member(
    cell: Cell,
    table: Table,
    family: Any,
    expression: str,
    text: str,
    images: str | None,
    seeds: Sequence[int],
    budget: Mapping[str, Any],
    costs: bool,
    dense: str | None = None,
    control: str | None = None,
) -> Row:
    """Return the scores of a row of the table over all seeds, its verdict and its costs.

    Args:
        cell: the cell.
        table: "decoder", "encoder" or "image".
        family: the kind of member.
        expression: the member.
        text: the folder of the prepared text.
        images: MNIST's IDX file of images, for the rows of images.
        seeds: the seeds of the training runs.
        budget: the fields of `Budget`, equal for all rows.
        costs: whether to measure memory and slope too.
        dense: the folder of the cell of dense attention; None for that cell itself.
        control: the folder of the cell of the control; None for that cell itself.
    """
    row, size = Member(table, family, expression), Budget(**budget)
    if table == "image" and images is None:
        return {"verdict": "not run: it needs images"}
    drawn = functools.partial(batches, text, images, table, size)
    training, held_out, vocabulary = drawn(seeds[0])
    size = dataclasses.replace(size, length=held_out.answers.shape[1])
    if (reason := refusal(row, size, training[0], vocabulary)) is not None:
        return {"verdict": reason}
    scores = [dataclasses.asdict(train(row, size, *drawn(seed), seed)) for seed in seeds]
    cell.folder.mkdir(parents=True, exist_ok=True)
    write_json(cell.folder / SCORES, {"scores": scores})
    result: Row = {"expression": fitted(expression, size.length)}
    for kind in held_out.kinds:
        measure = "right" if kind in ("recall", "back") else "nats"
        result[kind] = statistics.fmean(score[measure][kind] for score in scores)
    asked = row.asks
    result |= compared(_nats(scores, asked), nats(dense, asked), nats(control, asked), LEAST[asked])
    result["milliseconds"] = statistics.median(score["milliseconds"] for score in scores)
    return (
        {**result, "mebibytes": trial.mebibytes(row, size), "slope": trial.slope(row, size)}
        if costs
        else result
    )


def compared(
    own: Sequence[float], dense: Sequence[float] | None, control: Sequence[float] | None, least: float
) -> Row:
    """Return the least and the greatest share of the scale that a seed closes, and the verdict."""
    if control is None:
        return {"verdict": "the control"}
    scale = statistics.mean(control) - statistics.mean(dense or own)
    if scale < least:
        return {"verdict": "no verdict: dense is as the control"}
    shares = [(statistics.mean(control) - value) / scale for value in own]
    return {"least": min(shares), "most": max(shares), "verdict": judged(shares)}


def judged(shares: Sequence[float]) -> str:
    """Return the verdict on the shares that the seeds close."""
    if min(shares) >= 1 + ALIKE:
        return "better than dense"
    if min(shares) >= 1 - ALIKE:
        return "as dense"
    if max(shares) <= -ALIKE:
        return "worse than the control"
    return "as the control" if max(shares) <= ALIKE else "between"


def nats(folder: str | None, kind: str) -> list[float] | None:
    """Return the nats of another cell by seed."""
    return None if folder is None else _nats(read_json(Path(folder) / SCORES, dict)["scores"], kind)


def _nats(scores: Iterable[Mapping[str, Any]], kind: str) -> list[float]:
    return [score["nats"][kind] for score in scores]


@functools.lru_cache(maxsize=9)
def batches(
    text: str, images: str | None, table: Table, budget: Budget, seed: int
) -> tuple[list[Rows], Rows, int]:
    """Return batches to train on, held-out rows, and the size of the vocabulary."""
    generator, steps = torch.Generator().manual_seed(seed), range(budget.steps)
    if table == "image":
        assert images is not None
        every = trial.pixels(images, IMAGES)
        held, train = every[: budget.held_out], every[budget.held_out :]
        drawn = [torch.randint(len(train), (budget.rows,), generator=generator) for _ in steps]
        return [trial.as_rows(train[own]) for own in drawn], trial.as_rows(held), trial.LEVELS
    train = trial.letters(f"{text}/train.jsonl", TRAIN)
    training = [trial.questions(train, budget.rows, budget.length, table, generator) for _ in steps]
    later = torch.Generator().manual_seed(HELD_OUT_SEED)
    last = trial.letters(f"{text}/validation.jsonl", HELD_OUT)
    held = trial.questions(last, budget.held_out, budget.length, table, later)
    return training, held, trial.VOCABULARY
