"""Distill a trained run (the teacher) into a smaller, faster model of the same kind (the student).

The student has half of the teacher's layers (or --layers), is initialized with their weights, and learns from
the teacher's predictions, the labels and the teacher's hidden states, as DistilBERT does. Task, data,
tokenizer and training settings are the teacher's unless options change them. Prints the metrics and the speed
of both models. The result is a run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import Device, argument, device, option, recipe_settings
from polyformer.core.errors import InputError
from polyformer.core.ranges import COUNT

if TYPE_CHECKING:
    from polyformer.training.recipes.fit import Fitted

EXAMPLES = """examples:
  polyformer distill runs/sst2-1
  polyformer distill runs/sst2-1 --layers 1 --steps 400 --out runs/small
  polyformer distill runs/sst2-1 --distillation.temperature 4 --distillation.cosine 0
  polyformer distill --resume runs/small
"""

BATCHES, REPEATS = 8, 5
"""Number of held-out batches, and of alternating repetitions, to time teacher and student on."""


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Options of `polyformer distill`."""

    teacher: str | None = argument("folder of the trained run to distill", None)
    layers: int | None = option("number of layers of the student (default: half of the teacher's)")
    data: str | None = option("file or directory to train on (default: the teacher's data)", metavar="PATH")
    steps: int | None = option("number of training steps (default: the teacher's)", most=COUNT)
    out: str | None = option(
        "folder of the new run (default: runs/distilled-NUMBER)", metavar="DIR", output="folder"
    )
    resume: str | None = option(
        "resume the distillation in this folder from its last checkpoint", metavar="DIR"
    )
    seed: int | None = option("seed of data order and dropout (default: the teacher's)", most=COUNT)
    device: Device | None = device(None)
    changes: dict[str, Any] = recipe_settings("--distillation.soft 1")


def run(options: DistillOptions) -> None:
    """Train the student and compare it with the teacher."""
    from polyformer.cli.commands.train import conclude, train
    from polyformer.training.engine import is_main
    from polyformer.training.recipes import Recipe
    from polyformer.training.run_control import ignore_sigusr1

    recipe = Recipe.from_dict(recipe_data(options))
    with ignore_sigusr1():
        fitted = train(recipe, "distilled", options.out, options.resume)
        if is_main():
            conclude(fitted, recipe.seed)
            assert recipe.distillation is not None
            print(f"\n{comparison(fitted, recipe.distillation.teacher)}")


def recipe_data(options: DistillOptions) -> dict[str, Any]:
    """Return the recipe that the options describe, as plain data."""
    from polyformer.training.recipes.distill import distillation_recipe
    from polyformer.training.recipes.recipe import absolute, with_changes, with_data
    from polyformer.training.recipes.run import Run

    if options.resume is not None:
        if options.teacher or options.out or options.layers:
            raise InputError(
                "--resume: the run defines teacher, layers and folder; leave out TEACHER, --out and --layers"
            )
        recipe = Run.open(options.resume).recipe
        if recipe.distillation is None:
            raise InputError(f"{options.resume}: this run has no teacher; use polyformer train --resume")
    elif options.teacher is None:
        raise InputError("TEACHER is missing: name the folder of the run to distill")
    else:
        recipe = distillation_recipe(options.teacher, options.layers)
    values = recipe.to_dict()
    if options.data is not None:
        values["data"] = with_data(values["data"], options.data)
    named = {"training.steps": options.steps, "seed": options.seed, "training.engine.device": options.device}
    values = with_changes(values, {name: value for name, value in named.items() if value is not None})
    values = with_changes(values, options.changes)
    return {**values, "data": absolute(values["data"])}


def comparison(fitted: "Fitted", folder: str) -> str:
    """Return the metrics and times of teacher and student on the same held-out data."""
    from polyformer.core.measuring import median, time_interleaved
    from polyformer.training.recipes.report import table
    from polyformer.training.recipes.run import Run

    student = fitted.model
    device = next(student.parameters()).device
    models = {"teacher": Run.open(folder).model(device.type), "student": student}
    splits = {"validation": fitted.splits.validation, "test": fitted.splits.test}
    held = {name: rows for name, rows in splits.items() if rows is not None}
    if not held:
        return "No held-out data: teacher and student are not compared"
    scores = {f"teacher, {name}": fitted.task.score(models["teacher"], rows) for name, rows in held.items()}
    scores |= {f"student, {name}": metrics for name, metrics in fitted.scores.items()}
    last = [*held.values()][-1]
    seconds = time_interleaved(
        {name: _passes(fitted, model, last) for name, model in models.items()}, REPEATS
    )
    medians = {name: median(times) for name, times in seconds.items()}
    counts = {name: sum(tensor.numel() for tensor in model.parameters()) for name, model in models.items()}
    faster = medians["teacher"] / medians["student"]
    fitted.run.record(teacher={"scores": scores, "seconds": medians, "speed": faster})
    return "\n".join(
        [
            table([*scores.items()]),
            *_retained(fitted, scores),
            f"parameters: {counts['teacher']:,} and {counts['student']:,}",
            f"{medians['teacher'] * 1e3:.1f} and {medians['student'] * 1e3:.1f} ms for the same batches "
            f"(median of {REPEATS}, in turn): the student is {faster:.2f} times as fast",
        ]
    )


def _retained(fitted: "Fitted", scores: dict[str, dict[str, float]]) -> list[str]:
    """Return the student's metric as a share of the teacher's, for metrics where higher is better."""
    best = fitted.task.best
    if fitted.task.direction == "min":
        return []
    metric = best.replace("_", " ")
    splits = [name.removeprefix("student, ") for name in scores if name.startswith("student, ")]
    shares = {
        split: scores[f"student, {split}"][best] / max(scores[f"teacher, {split}"][best], 1e-12)
        for split in splits
    }
    return [f"{split}: {share:.1%} of the teacher's {metric}" for split, share in shares.items()]


def _passes(fitted: "Fitted", model: Any, rows: Any) -> Callable[[], None]:
    """Return a function that evaluates `model` on some held-out batches."""
    import itertools

    import torch

    from polyformer.core.host_values import batch_to_device

    device = next(model.parameters()).device
    held = itertools.islice(fitted.task.rows.held_out(rows).batches.epoch(0), BATCHES)
    batches = [batch_to_device(batch, device) for _, batch in held]

    @torch.no_grad()
    def call() -> None:
        for batch in batches:
            fitted.task.metrics.totals(model, batch)

    return call
