"""The function `fit`: train the model of a recipe and save it in a folder; and `fit_stages`, several runs in
turn.

A new model starts from random weights, a checkpoint, an earlier run, a teacher, or with the word vectors of a
file as token embeddings, optionally frozen (`--pretrained-vectors FILE`).

Each stage of a staged training doubles text and window lengths and halves the learning rate: stage i (from 0)
of a recipe has windows and rows 2^i times longer and a learning rate of lr / 2^i, and starts from the weights
of the previous stage. Thus most updates are cheap, and the final model still has the full length. Beltagy et
al. 2020 (Longformer), section 4.2. Every stage is a separate run, with its schedule from the start; longer
rows mean fewer rows per batch. The first stage may start from a checkpoint. Tables of learned positions are
extended between stages by copying (section 5).
"""

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyformer.attention.patterns import Window
from polyformer.attention.patterns.base import Pattern
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.modules import names_wrong_types
from polyformer.data import DataConfig, Splits, Tokenizer, load
from polyformer.data.sources.checks import Fingerprint, fingerprint, overlaps
from polyformer.data.word_vectors import read_word_vectors, word_ids
from polyformer.models.architectures import AnyConfig, TowersConfig, Transformer, build_model, read_config
from polyformer.models.architectures.pretrained import RECIPE, read_generation, save_config_files
from polyformer.models.checkpoints import config_of, extend_positions, fit_tables, start_from
from polyformer.models.initialization import Draw
from polyformer.training import Result
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.engine import is_main
from polyformer.training.loop import Training
from polyformer.training.recipes.distill import DistillationTask, copy_teacher_layers
from polyformer.training.recipes.recipe import ModelChoice, Recipe, VectorsConfig
from polyformer.training.recipes.run import DATA, STEPS, Run, check_data, check_same_recipe, folder_of
from polyformer.training.run_control import sole_writer
from polyformer.training.task import SINGLE_PROCESS
from polyformer.training.tasks import (
    LanguageModellingConfig,
    MaskedModellingConfig,
    Task,
    TaskWithData,
    Workers,
)
from polyformer.training.tuning import check_start, draw_adapter, weights_file, write_adapter


def copy_vectors(config: VectorsConfig, model: Transformer, tokenizer: Tokenizer | None) -> str:
    """Copy the vectors of words into the rows of their tokens in every token table; return a note.

    The other rows do not change. Raises `InputError` for vectors with another width than the table, for an
    adaptive (clustered) table, and in the cases of `read_word_vectors`.
    """
    if tokenizer is None:
        raise InputError("vectors: this task reads no words; leave them out")
    tables = _tables(model)
    words = read_word_vectors(config.path, word_ids(tokenizer))
    for table in tables:
        if table.embedding_dim != words.width:
            raise InputError(
                f"vectors: {config.path} has vectors of {words.width} numbers, the token table of "
                f"{table.embedding_dim}; use --model.embedding.size {words.width}, with a matrix from there "
                "to hidden_size (in language models beside --model.tied false), or --model.hidden_size "
                f"{words.width}"
            )
        with torch.no_grad():
            ids, vectors = torch.from_numpy(words.ids), torch.from_numpy(words.vectors)
            table.weight[ids] = vectors.to(table.weight)
    covered, way = len(words.ids), "frozen" if config.frozen else "trained further"
    return (
        f"vectors of {config.path}: {covered:,} of {len(tokenizer):,} tokens are among its {words.words:,} "
        f"words; the others begin at random, all are {way}"
    )


def freeze_vectors(model: Transformer) -> None:
    """Freeze the token tables, including rows without a pretrained vector, and a tied output layer."""
    for table in _tables(model):
        table.weight.requires_grad_(False)


def _tables(model: Transformer) -> list[nn.Embedding]:
    tables = [table for table in (model.tokens, model.decoder_tokens) if table is not None]
    plain = [table for table in tables if isinstance(table, nn.Embedding)]
    if len(plain) < len(tables):
        raise InputError(
            "vectors: this model's token vectors are of several widths; leave out embedding.adaptive"
        )
    return plain


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
        joined = task.objective.training_module(model)
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
    auxiliary = task.objective.auxiliary_models(joined)
    models = {run.folder: model, **{run.folder / name: helper for name, helper in auxiliary.items()}}
    result = training.run(dict(weights_file(folder, trained) for folder, trained in models.items()))
    scores: Scores = {}
    if is_main():
        _save_settings(recipe, models)
    model.labels = tuple(getattr(task, "labels", ()))  # not written: the recipe names them
    if training.engine.whole:
        scores = score(task, joined, splits, result, Workers.of(training.engine.evaluation_group))
    elif is_main():
        if task.finishes:  # otherwise a model too large for the device stays in its files
            joined.to(training.engine.device)
        scores = score(task, joined, splits, result)
    if is_main():
        run.record(**_facts(model, result, scores))
    return Fitted(run, task, splits, model, result, scores)


def _save_settings(recipe: Recipe, models: Mapping[Path, Transformer]) -> None:
    """Write the files of the models by folder, except the weights."""
    for folder, trained in models.items():
        save_config_files(trained, folder)
        write_adapter(recipe.tuning, trained, folder, recipe.model.pretrained)


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
        and task.objective.plain
        and recipe.distillation is None
        and not (new_run and (start or recipe.model.pretrained or recipe.vectors))
    )
    model, draw = _initialized_model(recipe, config, deferred)
    if new_run or recipe.tuning is not None:  # whose checkpoints leave out the frozen weights
        _first_weights(recipe, model, tokenizer, start)
    if not new_run:
        model.generation = read_generation(run.folder)
    if recipe.tuning is not None:
        draw_adapter(recipe.tuning, model, recipe.seed + 2)
    if recipe.vectors is not None and recipe.vectors.frozen:
        freeze_vectors(model)
    return model, draw if new_run else None


def _initialized_model(recipe: Recipe, config: AnyConfig, deferred: bool) -> tuple[Transformer, Draw | None]:
    """Return the model with weights drawn from the seed of the recipe.

    With `deferred`, most weights are drawn by the returned function, after the model is sharded. A model that
    is tuned has no values yet, as all of them come from a checkpoint.
    """
    if recipe.tuning is not None:
        with torch.device("meta"):
            tuned: Any = build_model(config)
        return tuned, None
    with torch.random.fork_rng():  # do not change the random state of the program
        torch.manual_seed(recipe.seed)
        if not deferred:
            model: Any = build_model(config)
            return model, None
        from polyformer.training.distributed.fully_sharded import deferred_draw, deferred_initialization

        assert not isinstance(config, TowersConfig), "no task trains a model of two towers"
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
        if recipe.tuning is not None:
            check_start(report, recipe.model.pretrained)
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


Staged = LanguageModellingConfig | MaskedModellingConfig


def stages(recipe: Recipe, number: int) -> list[Recipe]:
    """Return the recipes of `number` stages; the first is `recipe`.

    Raises `InputError` for a number below 1, and for tasks other than `lm` and `mlm`.
    """
    if number < 1:
        raise InputError(f"number: expected 1 stage or more, got {number}")
    if not isinstance(recipe.task, Staged):
        raise InputError(f"stages: expected the task 'lm' or 'mlm', got {quote(recipe.task.kind)}")
    return [recipe, *(_stage(recipe, recipe.task, 2**i) for i in range(1, number))]


def fit_stages(recipe: Recipe, out: str | Path, number: int) -> list[Fitted]:
    """Train `number` stages in sequence, in the folders `out`/stage-1, `out`/stage-2, ...

    Existing stages are continued: finished stages are skipped (and not returned), an interrupted stage is
    resumed. Raises `InputError` for stages of another recipe.
    """
    fitted: list[Fitted] = []
    start: Path | None = None
    for i, stage in enumerate(stages(recipe, number), 1):
        run = Run(Path(out) / f"stage-{i}")
        started = (run.folder / RECIPE).is_file()
        if started and run.recipe != stage:
            raise InputError(f"{run.folder}: a stage of another recipe; choose another --out")
        if not (started and run.finished and i < number):
            fitted.append(fit(stage, run.folder, resume=started, start=start))
        start = run.folder
    return fitted


def widen_windows(part: Any, factor: int) -> Any:
    """Return `part`, a pattern or a configuration, with every window `factor` times wider.

    The current token of a window counts with the tokens before it: a causal window of 256 becomes 512.
    """
    if isinstance(part, Window):
        after = part.keys_after
        before = part.before * factor if after else (part.before + 1) * factor - 1
        return dataclasses.replace(part, before=before, after=after * factor)
    if isinstance(part, tuple):
        return tuple(widen_windows(layer, factor) for layer in part)
    if not isinstance(part, Config | Pattern):
        return part
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    changes = {name: widen_windows(value, factor) for name, value in fields.items()}
    return dataclasses.replace(
        part, **{name: value for name, value in changes.items() if value != fields[name]}
    )


def _stage(recipe: Recipe, task: Staged, factor: int) -> Recipe:
    length = task.row_length * factor
    config = recipe.model.config()
    if recipe.model.pretrained is not None:  # the first stage may need more positions than the checkpoint
        config = extend_positions(config, max(config.max_position_embeddings, task.row_length))
    return dataclasses.replace(
        recipe,
        model=ModelChoice(options=widen_windows(config, factor).to_dict()),
        task=dataclasses.replace(task, row_length=length, batch_tokens=max(task.batch_tokens, length)),
        optimizer=dataclasses.replace(recipe.optimizer, lr=recipe.optimizer.lr / factor),
    )
