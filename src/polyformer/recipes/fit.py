"""`fit`: a recipe made into a trained model, in a folder of its own."""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyformer.checkpoints import config_of, fit_tables, start_from
from polyformer.core.errors import InputError, quote
from polyformer.core.initialization import Draw
from polyformer.data import DataConfig, Splits, Tokenizer, load
from polyformer.data.fingerprint import Fingerprint, fingerprint
from polyformer.model import AnyConfig, Transformer, build_model, read_config
from polyformer.model.saving import WEIGHTS, read_generation, save_beside_weights
from polyformer.recipes.distill import Distilling
from polyformer.recipes.pretrained_vectors import copy_vectors, freeze_vectors
from polyformer.recipes.recipe import Recipe
from polyformer.recipes.resume import DATA, check_data, check_same, folder_of
from polyformer.recipes.run import STEPS, Run
from polyformer.recipes.student import take_layers
from polyformer.tasks import Fitting, Task, Workers
from polyformer.tasks.workers import ALONE
from polyformer.training import Result
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.engine import is_main
from polyformer.training.lock import sole_writer
from polyformer.training.loop import Training

Scores = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A finished run: its parts in memory, and its metrics by split ("validation", "test")."""

    run: Run
    task: Task
    splits: Splits
    model: Transformer
    result: Result
    scores: Scores


def fit(
    recipe: Recipe,
    out: str | Path,
    resume: bool = False,
    start: str | Path | None = None,
    from_step: int | None = None,
    changed_data: bool = False,
) -> Fitted:
    """Train what `recipe` describes, into the folder `out`; `resume` goes on with the run there.
    `start` is the folder of another run, whose tokenizer and weights a new one begins with; a recipe with a
    teacher begins with that one's (see `distill`).

    A resumed run goes on from its last checkpoint or from that of `from_step`, and is refused where the data
    are no longer what they were, but for `changed_data`. What is refused leaves the folder as it was.

    The folder then holds all that `polyformer.recipes.Run` and `from_pretrained` read. Under `torchrun` every
    process calls this alike, and the first one writes.
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
    recipe = settled(recipe, splits)
    if resume:
        check_same(run, recipe)
        start = start or run.facts.get("start")  # the folders of stages may have been moved together
    tokenizer = _tokenizer(run, recipe, splits, resume, start)
    task = recipe.task.build(tokenizer)
    config = read_config(run.folder) if resume else _config(recipe, task, start)
    model, draw = _model(run, recipe, task, config, tokenizer, start)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed + 1)  # a helper's weights are not the model's
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
    # Nothing is written before all that can be wrong with the input was found.
    if is_main():
        facts = {DATA: data} if start is None else {DATA: data, "start": str(Path(start).absolute())}
        run.begin(recipe, tokenizer, model, **facts)
    auxiliary = task.auxiliary_models(joined)
    models = {run.folder: model, **{run.folder / name: helper for name, helper in auxiliary.items()}}
    result = training.run({folder / WEIGHTS: trained for folder, trained in models.items()})
    scores: Scores = {}
    if is_main():
        for folder, trained in models.items():
            save_beside_weights(trained, folder)
    if training.engine.mesh is None:
        scores = score(task, joined, splits, result, Workers.of(training.engine.evaluators))
    elif is_main():
        if task.finishes:  # else a model that no device holds stays in the files that it was written to
            joined.to(training.engine.device)
        scores = score(task, joined, splits, result)
    if is_main():
        parameters = sum(parameter.numel() for parameter in model.parameters())
        run.record(parameters=parameters, **{STEPS: result.step}, metrics=scores)
    return Fitted(run, task, splits, model, result, scores)


def own_data(recipe: Recipe) -> Splits | None:
    """What the task makes itself in place of reading data; `InputError` where data are named all the same."""
    own = recipe.task.own_data
    if own is not None and recipe.data != DataConfig():
        raise InputError(f"data: the task {quote(recipe.task.kind)} makes its own; leave it out")
    return own


def own_fingerprint(recipe: Recipe) -> Fingerprint:
    """The fingerprint of what a task reads itself, by the names of its sources and their roles."""
    return {
        f"{name}.{role}": files
        for name, (data, needs) in recipe.task.own_sources.items()
        for role, files in fingerprint(data, needs).items()
    }


def settled(recipe: Recipe, splits: Splits) -> Recipe:
    """`recipe` with what only its data can tell."""
    task = recipe.task.situated(recipe.data.path).resolve(splits.train)
    return dataclasses.replace(recipe, task=task)


def _tokenizer(
    run: Run, recipe: Recipe, splits: Splits, resume: bool, start: str | Path | None
) -> Tokenizer | None:
    """That of the run itself, of the run it starts from or of its teacher; else a new one. None for a task
    that reads no text."""
    if not recipe.task.tokenized:
        return None
    known = run.folder if resume else start or (recipe.distillation and recipe.distillation.teacher)
    if known is None:
        return recipe.task.tokenizer(recipe.tokenizer, splits.train)
    return Run.open(known).tokenizer


def _config(recipe: Recipe, task: Task, start: str | Path | None) -> AnyConfig:
    """The configuration of a new run's model; a run that goes on has one of its own."""
    base = recipe.model_config()
    config = task.adapt(base)
    if start is not None:
        before: Any = config_of(start)
        return fit_tables(config, before)
    return config if recipe.model.pretrained is None else fit_tables(config, base)


def divides(recipe: Recipe, task: Task) -> bool:
    """Whether processes divide the model, and nothing reads its weights before they do."""
    return not recipe.training.engine.parallel.whole and task.spreads and recipe.distillation is None


def _model(
    run: Run,
    recipe: Recipe,
    task: Task,
    config: AnyConfig,
    tokenizer: Tokenizer | None,
    start: str | Path | None,
) -> tuple[Transformer, Draw | None]:
    """The model that a run begins with, and what draws its missing weights once it is divided; if the run
    goes on, a checkpoint has them."""
    begins = Checkpoints(run.folder).latest() is None
    late = divides(recipe, task) and not (begins and (start or recipe.model.pretrained or recipe.vectors))
    model, draw = _drawn(recipe, config, late)
    if begins:
        _first_weights(recipe, model, tokenizer, start)
    else:
        model.generation = read_generation(run.folder)
    if recipe.vectors is not None and recipe.vectors.frozen:
        freeze_vectors(model)
    return model, draw if begins else None


def _drawn(recipe: Recipe, config: AnyConfig, late: bool) -> tuple[Transformer, Draw | None]:
    """The model, with weights drawn from the recipe's seed; with `late` most are drawn by the function behind
    it, when the model is divided."""
    with torch.random.fork_rng():  # the seed is this run's, not the program's
        torch.manual_seed(recipe.seed)
        if not late:
            model: Any = build_model(config)
            return model, None
        from polyformer.parallel.late_weights import drawing, late_weights

        with late_weights():
            model = build_model(config)
        return model, drawing(model, config.initializer_range)


def _first_weights(
    recipe: Recipe, model: Transformer, tokenizer: Tokenizer | None, start: str | Path | None
) -> None:
    """Put the weights that a run begins with into `model`, where they are not drawn."""
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


def _fitting(recipe: Recipe, task: Task, splits: Splits, model: Transformer) -> Fitting:
    """The task and its data; under a teacher, whose layers `model` takes unless it is to have its own."""
    lesson = recipe.distillation
    if lesson is None:
        return Fitting(task, splits, recipe.seed)
    teacher = Run.open(lesson.teacher).result("cpu")
    if not lesson.fresh:
        take_layers(model, teacher)
    return Distilling(task, splits, recipe.seed, model, teacher, lesson)


def score(task: Task, model: nn.Module, splits: Splits, result: Result, workers: Workers = ALONE) -> Scores:
    """The final metrics of every split: what training measured of the final weights, and what they write."""
    measured = {"validation": result.metrics, **result.concluded}
    rows = {"validation": splits.validation, "test": splits.test}
    return {
        name: {**measured[name], **task.finish(model, split, workers)}
        for name, split in rows.items()
        if split is not None
    }
