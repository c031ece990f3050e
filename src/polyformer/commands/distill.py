"""Distil a trained run into a smaller, faster model of the same kind.

The student has half of the teacher's layers (or --layers), begins with their weights and learns from the
teacher's predictions, the labels and the teacher's hidden states, as DistilBERT does. Task, data, tokenizer
and training are the teacher's, where nothing else is said; the student's folder is a run as any other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from polyformer.commands.base import argument, changes, option
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.recipes.fit import Fitted

EXAMPLES = """examples:
  polyformer distill runs/sst2-1
  polyformer distill runs/sst2-1 --layers 1 --steps 400 --out runs/small
  polyformer distill runs/sst2-1 --distillation.temperature 4 --distillation.cosine 0
  polyformer distill --resume runs/small
"""

BATCHES, REPEATS = 8, 5
"""Of held-out data, on which teacher and student are timed in turn."""


@dataclass(frozen=True, kw_only=True)
class Options:
    teacher: str | None = argument("folder of the run to learn from", None)
    layers: int | None = option("layers of the student (default: half of the teacher's)")
    data: str | None = option("what to train on, in place of the teacher's data")
    steps: int | None = option("updates of the weights (default: as many as the teacher's)")
    out: str | None = option("folder of the run (default: runs/distilled-NUMBER)")
    resume: str | None = option("folder of a distilled run to go on with, from its last checkpoint")
    seed: int | None = option("seed of the order of data, and of dropout (default: the teacher's)")
    device: Literal["auto", "cpu", "cuda"] | None = option(
        "where to compute (default: CUDA where there is one)"
    )
    changes: dict[str, Any] = changes(
        "--any.nested.key VALUE changes one value of the recipe, such as --distillation.soft 1"
    )


def run(options: Options) -> None:
    from polyformer.commands.train import conclude, train
    from polyformer.recipes import Recipe
    from polyformer.training.engine import is_main
    from polyformer.training.signals import surviving_warnings

    recipe = Recipe.from_dict(described(options))
    with surviving_warnings():
        fitted = train(recipe, "distilled", options.out, options.resume)
        if is_main():
            conclude(fitted, recipe.seed)
            assert recipe.distillation is not None
            print(f"\n{compared(fitted, recipe.distillation.teacher)}")


def described(options: Options) -> dict[str, Any]:
    """The recipe that the options describe, as plain data."""
    from polyformer.recipes.distill import distilled
    from polyformer.recipes.find import absolute, with_data
    from polyformer.recipes.recipe import merged, nested
    from polyformer.recipes.run import Run

    if options.resume is not None:
        if options.teacher or options.out or options.layers:
            raise InputError(
                "--resume: the run knows its teacher, layers and folder; leave TEACHER, --out and --layers "
                "away"
            )
        recipe = Run.open(options.resume).recipe
        if recipe.distillation is None:
            raise InputError(f"{options.resume}: this run has no teacher; use polyformer train --resume")
    elif options.teacher is None:
        raise InputError("TEACHER: name the folder of a run to learn from")
    else:
        recipe = distilled(options.teacher, options.layers)
    described = recipe.to_dict()
    if options.data is not None:
        described["data"] = with_data(described["data"], options.data)
    named = {"training.steps": options.steps, "seed": options.seed, "training.engine.device": options.device}
    for name, value in [*((k, v) for k, v in named.items() if v is not None), *options.changes.items()]:
        described = merged(described, nested(name, value))
    return {**described, "data": absolute(described["data"])}


def compared(fitted: "Fitted", folder: str) -> str:
    """What teacher and student come to on the same data, and how long each takes for it."""
    from polyformer.bench.timing import in_turn, median
    from polyformer.recipes.report import table
    from polyformer.recipes.run import Run

    student = fitted.model
    device = next(student.parameters()).device
    models = {"teacher": Run.open(folder).model(device.type), "student": student}
    splits = {"validation": fitted.splits.validation, "test": fitted.splits.test}
    held = {name: rows for name, rows in splits.items() if rows is not None}
    if not held:
        return "No held-out data: teacher and student are not compared"
    scores = {f"teacher, {name}": fitted.task.score(models["teacher"], rows) for name, rows in held.items()}
    scores |= {f"student, {name}": one for name, one in fitted.scores.items()}
    last = [*held.values()][-1]
    seconds = in_turn({name: _passes(fitted, model, last) for name, model in models.items()}, REPEATS)
    medians = {name: median(one) for name, one in seconds.items()}
    counts = {name: sum(one.numel() for one in model.parameters()) for name, model in models.items()}
    faster = medians["teacher"] / medians["student"]
    fitted.run.record(teacher={"scores": scores, "seconds": medians, "speed": faster})
    return "\n".join(
        [
            table([*scores.items()]),
            *_kept(fitted, scores),
            f"parameters: {counts['teacher']:,} and {counts['student']:,}",
            f"{medians['teacher'] * 1e3:.1f} and {medians['student'] * 1e3:.1f} ms for the same batches "
            f"(median of {REPEATS}, in turn): the student is {faster:.2f} times as fast",
        ]
    )


def _kept(fitted: "Fitted", scores: dict[str, dict[str, float]]) -> list[str]:
    """The share of the teacher's metric that the student keeps, where more of it is better."""
    best = fitted.task.best
    if fitted.task.direction == "min":
        return []
    parts = [name.removeprefix("student, ") for name in scores if name.startswith("student, ")]
    return [
        f"{one}: {scores[f'student, {one}'][best] / max(scores[f'teacher, {one}'][best], 1e-12):.1%} "
        f"of the teacher's {best.replace('_', ' ')}"
        for one in parts
    ]


def _passes(fitted: "Fitted", model: Any, rows: Any) -> Callable[[], None]:
    """Predictions for some held-out batches."""
    import itertools

    import torch

    device = next(model.parameters()).device
    held = itertools.islice(fitted.task.held_out(rows).batches.epoch(0), BATCHES)
    batches = [{name: one.to(device) for name, one in batch.items()} for _, batch in held]

    @torch.no_grad()
    def call() -> None:
        for batch in batches:
            fitted.task.totals(model, batch)

    return call
