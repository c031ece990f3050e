"""The function `fit`: train the model of a recipe and save it in a folder."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyformer.core.argument_types import names_wrong_types
from polyformer.core.errors import InputError, quote
from polyformer.data import DataConfig, Splits, Tokenizer, load
from polyformer.data.sources.checks import Fingerprint, fingerprint, overlaps
from polyformer.models.architectures import AnyConfig, Transformer, build_model, read_config
from polyformer.models.architectures.pretrained import WEIGHTS, read_generation, save_config_files
from polyformer.models.checkpoints import config_of, fit_tables, start_from
from polyformer.models.initialization import Draw
from polyformer.training import Result
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.engine import is_main
from polyformer.training.lock import sole_writer
from polyformer.training.loop import Training
from polyformer.training.recipes.distill import DistillationTask, copy_teacher_layers
from polyformer.training.recipes.pretrained_vectors import copy_vectors, freeze_vectors
from polyformer.training.recipes.recipe import Recipe
from polyformer.training.recipes.run import DATA, STEPS, Run, check_data, check_same_recipe, folder_of
from polyformer.training.tasks import Task, TaskWithData, Workers
from polyformer.training.tasks.base import SINGLE_PROCESS

REPEATED = "repeated"  # in run.json: held-out rows that repeat training rows, by split

Scores = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A finished run: its objects in memory, and its metrics by split ("validation", "test")."""

    run: Run
    task: Task
    splits: Splits
    model: Transformer
    result: Result
    scores: Scores


@names_wrong_types
def fit(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    start: str | Path | None = None,
    from_step: int | None = None,
    changed_data: bool = False,
) -> Fitted:
    """Train the model of `recipe` and save it in the folder `out`; `resume` continues the run in `out`.

    `start` is the folder of another run, from which a new run takes the tokenizer and the initial weights; a
    recipe with a teacher takes both from the teacher (see `distill`).

    A resumed run continues from its last checkpoint or from the checkpoint of `from_step`. It raises
    `InputError` if the data or the tokenizer's files have changed, unless `changed_data`. An error about the
    arguments leaves the folder unchanged.

    Afterwards the folder can be read by `polyformer.training.recipes.Run` and `from_pretrained`. Under
    `torchrun` every process calls this with the same arguments, and the first process writes.
    """
    run = folder_of(out, resume)
    with sole_writer(run.folder) if is_main() else nullcontext():
        return _fit(folder_of(out, resume), recipe, resume, start, from_step, changed_data)


def _fit(
    run: Run,
    recipe: Recipe,
    resume: bool,
    start: str | Path | None,
    from_step: int | None,
    changed_data: bool,
) -> Fitted:
    own = own_data(recipe)
    data = own_fingerprint(recipe) if own else fingerprint(recipe.data, recipe.task.needs)
    if resume and not changed_data:
        check_data(run, data)
    splits = own or load(recipe.data, recipe.task.needs)
    recipe = resolve_recipe(recipe, splits)
    if resume:
        check_same_recipe(run, recipe)
        start = start or run.facts.get("start")  # the folders of all stages may have been moved
    tokenizer = _tokenizer(run, recipe, splits, resume, start)
    task = recipe.task.build(tokenizer)
    config = read_config(run.folder) if resume else _config(recipe, task, start)
    model, draw = _model(run, recipe, task, config, tokenizer, start)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed + 1)  # separate random numbers for auxiliary models
        joined = task.training_module(model)
    fitting = _fitting(recipe, task, splits, model)
    if is_main():
        print("".join(f"{note}\n" for note in task.notes), end="")
    training = Training(
        joined,
        fitting,
        recipe.training,
        recipe.optimizer,
        recipe.schedule,
        run.folder,
        recipe.seed,
        resume,
        from_step,
        draw,
    )
    # All errors in the input must be raised before this point, which writes the first file.
    if is_main():
        repeated = run.facts.get(REPEATED, {}) if own or resume else _repeated(recipe, splits)
        run.begin(recipe, tokenizer, model, **{DATA: data, REPEATED: repeated}, **_started_from(start))
    auxiliary = task.auxiliary_models(joined)
    models = {run.folder: model, **{run.folder / name: helper for name, helper in auxiliary.items()}}
    result = training.run({folder / WEIGHTS: trained for folder, trained in models.items()})
    scores: Scores = {}
    if is_main():
        for folder, trained in models.items():
            save_config_files(trained, folder)
    model.labels = tuple(getattr(task, "labels", ()))  # not written: the recipe names them
    if training.engine.mesh is None:
        scores = score(task, joined, splits, result, Workers.of(training.engine.evaluation_group))
    elif is_main():
        if task.finishes:  # otherwise a model too large for the device stays in its files
            joined.to(training.engine.device)
        scores = score(task, joined, splits, result)
    if is_main():
        run.record(**_facts(model, result, scores))
    return Fitted(run, task, splits, model, result, scores)


def _facts(model: Transformer, result: Result, scores: Scores) -> dict[str, Any]:
    """Return the facts of a finished run for run.json."""
    facts: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    facts |= {STEPS: result.step, "kept": result.kept.record(), "metrics": scores}
    if result.calibration is not None:
        facts["calibration"] = result.calibration.record()
    return facts


def _started_from(start: str | Path | None) -> dict[str, str]:
    return {} if start is None else {"start": str(Path(start).absolute())}


def _repeated(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Print how many held-out rows repeat training rows, and return the counts by split."""
    counts, notes = overlaps(recipe.data, splits, recipe.task.needs)
    print("".join(f"{note}\n" for note in notes), end="")
    return counts


def own_data(recipe: Recipe) -> Splits | None:
    """Return the data that the task generates, or None; raise `InputError` if data are also configured."""
    own = recipe.task.own_data
    if own is not None and recipe.data != DataConfig():
        raise InputError(f"data: the task {quote(recipe.task.kind)} makes its own; leave it out")
    return own


def own_fingerprint(recipe: Recipe) -> Fingerprint:
    """Return the fingerprint of the sources that a task reads, by source name and role."""
    return {
        f"{name}.{role}": files
        for name, (data, needs) in recipe.task.own_sources.items()
        for role, files in fingerprint(data, needs).items()
    }


def resolve_recipe(recipe: Recipe, splits: Splits) -> Recipe:
    """Return `recipe` with the options that depend on its data."""
    task = recipe.task.with_source_defaults(recipe.data.path).resolve(splits.train)
    return dataclasses.replace(recipe, task=task)


def _tokenizer(
    run: Run, recipe: Recipe, splits: Splits, resume: bool, start: str | Path | None
) -> Tokenizer | None:
    """Return the tokenizer of the run, of its start or of its teacher, or train a new tokenizer.

    None for a task without text.
    """
    if not recipe.task.tokenized:
        return None
    known = run.folder if resume else start or (recipe.distillation and recipe.distillation.teacher)
    if known is None:
        return recipe.task.tokenizer(recipe.tokenizer, splits.train)
    return Run.open(known).tokenizer


def _config(recipe: Recipe, task: Task, start: str | Path | None) -> AnyConfig:
    """Return the model configuration of a new run; a resumed run reads it from its folder."""
    base = recipe.model_config()
    config = task.adapt(base)
    if start is not None:
        before: Any = config_of(start)
        return fit_tables(config, before)
    return config if recipe.model.pretrained is None else fit_tables(config, base)


def _model(
    run: Run,
    recipe: Recipe,
    task: Task,
    config: AnyConfig,
    tokenizer: Tokenizer | None,
    start: str | Path | None,
) -> tuple[Transformer, Draw | None]:
    """Return the initial model of a run, and the function that draws its missing weights after sharding.

    In a resumed run a checkpoint provides the weights.
    """
    new_run = Checkpoints(run.folder).latest() is None
    # Sharded before its weights are read, so that they can be drawn late.
    deferred = (
        not recipe.training.engine.parallel.whole
        and task.supports_context_parallel
        and recipe.distillation is None
        and not (new_run and (start or recipe.model.pretrained or recipe.vectors))
    )
    model, draw = _initialized_model(recipe, config, deferred)
    if new_run:
        _first_weights(recipe, model, tokenizer, start)
    else:
        model.generation = read_generation(run.folder)
    if recipe.vectors is not None and recipe.vectors.frozen:
        freeze_vectors(model)
    return model, draw if new_run else None


def _initialized_model(recipe: Recipe, config: AnyConfig, deferred: bool) -> tuple[Transformer, Draw | None]:
    """Return the model with weights drawn from the seed of the recipe.

    With `deferred`, most weights are drawn by the returned function, after the model is sharded.
    """
    with torch.random.fork_rng():  # do not change the random state of the program
        torch.manual_seed(recipe.seed)
        if not deferred:
            model: Any = build_model(config)
            return model, None
        from polyformer.training.distributed.deferred_initialization import (
            deferred_draw,
            deferred_initialization,
        )

        with deferred_initialization():
            model = build_model(config)
        return model, deferred_draw(model, config.initializer_range)


def _first_weights(
    recipe: Recipe, model: Transformer, tokenizer: Tokenizer | None, start: str | Path | None
) -> None:
    """Load the initial weights that are not random into `model`."""
    if recipe.model.pretrained is not None:
        report = start_from(recipe.model.pretrained, model)
        if is_main():
            print(f"from {recipe.model.pretrained}\n{report}")
    if recipe.vectors is not None and start is None:
        note = copy_vectors(recipe.vectors, model, tokenizer)
        if is_main():
            print(note)
    if start is not None:
        report = start_from(start, model)
        if report.newly_initialized:
            raise InputError(
                f"{start}: its model has no {report.newly_initialized[0]} of the next one's shape; "
                "between stages only tables of positions may grow"
            )
        if is_main():
            print(f"from {start}\n{report}")


def _fitting(recipe: Recipe, task: Task, splits: Splits, model: Transformer) -> TaskWithData:
    """Return the task with its data; with a teacher, `model` gets its layers unless `fresh` is set."""
    lesson = recipe.distillation
    if lesson is None:
        return TaskWithData(task, splits, recipe.seed)
    teacher = Run.open(lesson.teacher).result("cpu")
    if not lesson.fresh:
        copy_teacher_layers(model, teacher)
    return DistillationTask(task, splits, recipe.seed, model, teacher, lesson)


def score(
    task: Task, model: nn.Module, splits: Splits, result: Result, workers: Workers = SINGLE_PROCESS
) -> Scores:
    """Return the final metrics of every split: from training, and of the texts that the model generates."""
    measured = {"validation": result.metrics, **result.final_metrics}
    rows = {"validation": splits.validation, "test": splits.test}
    return {
        name: {**measured[name], **task.finish(model, split, workers)}
        for name, split in rows.items()
        if split is not None
    }
