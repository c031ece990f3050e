"""Train a model from a recipe.

RECIPE is the name of a recipe in the package (see `polyformer list recipe`) or your own YAML file. The
default is `demo`: it trains a small language model on the source code of Python's standard library and writes
a page about the run. With only --data, format, columns and task are guessed from the data, and the guess is
printed (docs/data.md). The folder of the run contains everything that `evaluate`, `generate` and other
commands need (docs/runs.md).
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import Device, argument, device, imports, option, recipe_settings
from polyformer.core.errors import InputError
from polyformer.core.ranges import COUNT

if TYPE_CHECKING:
    from polyformer.training.recipes import Recipe
    from polyformer.training.recipes.fit import Fitted


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `polyformer train`."""

    recipe: str | None = argument(
        "name of a recipe, or a .yaml file (default: demo; with --data, guessed from the data)", None
    )
    data: str | None = option(
        "file or directory to train on; or the directory of the files that the recipe names", metavar="PATH"
    )
    model: str | None = option("preset to train, instead of the recipe's model", metavar="PRESET")
    pretrained: str | None = option(
        "checkpoint to start from, with its tokenizer, instead of the recipe's model", metavar="CHECKPOINT"
    )
    tuning: str | None = option(
        "train new weights only: 'lora(rank=16)', low-rank adapters of the projections", metavar="TUNING"
    )
    pretrained_vectors: str | None = option(
        "word vectors to initialize the token embeddings: a file of word2vec (text or binary) or GloVe",
        metavar="FILE",
    )
    freeze_vectors: bool = option("with --pretrained-vectors: do not train the token embeddings", False)
    steps: int | None = option("number of training steps (default: the recipe's)", most=COUNT)
    out: str | None = option(
        "folder of the new run (default: runs/NAME-NUMBER)", metavar="DIR", output="folder"
    )
    resume: str | None = option("resume the run in this folder from its last checkpoint", metavar="DIR")
    from_step: int | None = option(
        "with --resume: resume from the checkpoint of step N and delete later checkpoints", most=COUNT
    )
    changed_data: bool = option("with --resume: resume although the data or tokenizer have changed", False)
    seed: int | None = option("seed of weights, data order and dropout (default: the recipe's)", most=COUNT)
    device: Device | None = device(None)
    stages: int | None = option(
        "train N stages in subfolders of --out; each doubles the lengths of windows and rows and halves the "
        "learning rate; the same command resumes them"
    )
    plot: bool = option("plot the training curves to curves.png at the end", False)
    report: bool = option("write report.html, a page about the finished run", False)
    tracking: str | None = option(
        "send the metrics to these services too: tensorboard, wandb, mlflow, trackio, with commas between",
        metavar="NAMES",
    )
    print: bool = option("print the complete recipe as YAML and do not train", False)
    imports: tuple[str, ...] = imports()
    changes: dict[str, Any] = recipe_settings("--training.clip 0.5; --print shows them all")


def recipe_data(options: TrainOptions) -> dict[str, Any]:
    """Return the recipe of the resumed run, or the named or guessed recipe, with all options applied."""
    from polyformer.training.recipes.recipe import absolute, merged, with_changes

    recipe = _resumed(options) if options.resume is not None else _new(options)
    recipe = with_changes(recipe, named_settings(options))
    if options.pretrained is not None:
        if options.model is not None:
            raise InputError("--pretrained: the checkpoint defines the model; leave out --model")
        changed = (
            {} if options.resume is not None else recipe.get("model", {})
        )  # changes of the checkpoint's model
        start = merged({"model": changed}, {"model": {"pretrained": options.pretrained}})
        recipe |= {**start, "tokenizer": {"path": options.pretrained}}
    if options.pretrained_vectors is not None:
        path = str(Path(options.pretrained_vectors).absolute())
        recipe |= {"vectors": {"path": path, "frozen": options.freeze_vectors}}
    elif options.freeze_vectors:
        raise InputError("--freeze-vectors: requires --pretrained-vectors FILE")
    recipe = with_changes(recipe, options.changes)
    if isinstance(recipe.get("data"), dict) and not options.print:
        recipe["data"] = absolute(recipe["data"])
    return recipe


def _resumed(options: TrainOptions) -> dict[str, Any]:
    """Return the recipe of the run to resume."""
    from polyformer.training.recipes.recipe import with_data
    from polyformer.training.recipes.run import Run

    if options.recipe or options.out:
        raise InputError("--resume: the run defines recipe and folder; leave out RECIPE and --out")
    assert options.resume is not None
    recipe = Run.open(options.resume).recipe.to_dict()
    if options.data is not None:
        recipe["data"] = with_data(recipe.get("data") or {}, options.data)
    return recipe


def _new(options: TrainOptions) -> dict[str, Any]:
    """Return the recipe of a new run: RECIPE, or a guess from --data."""
    from polyformer.training.recipes.recipe import find_recipe, named_files, recipe_names, with_data

    if options.from_step is not None or options.changed_data:
        flag = "--changed-data" if options.from_step is None else "--from-step"
        raise InputError(f"{flag}: requires --resume RUN")
    recipe = find_recipe(recipe_name(options), pretrained=options.pretrained is not None)
    recipe = with_imports(recipe, options.imports)
    data = recipe.get("data") or {}
    if options.data is not None:
        if not data.get("path"):
            return _guessed(options, recipe)
        return {**recipe, "data": with_data(data, options.data)}
    named = named_files(data) and options.recipe in recipe_names()
    if named and "data.path" not in options.changes and not options.print:
        raise InputError(
            f"{options.recipe}: name the directory with its data ({data['path']}) with --data DIR"
        )
    return recipe


def recipe_name(options: TrainOptions) -> str:
    """Return RECIPE; by default `demo`, or `default` if data, a task or a checkpoint are named."""
    if options.recipe is not None:
        return options.recipe
    other = any(name.startswith("data") or name in ("task", "task.kind") for name in options.changes)
    return "default" if options.data or options.pretrained or options.resume or other else "demo"


def _guessed(options: TrainOptions, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe that fits --data; print what was guessed."""
    from polyformer.training.engine import is_main
    from polyformer.training.recipes.guessed import guessed_recipe

    assert options.data is not None
    settings = {**named_settings(options), **options.changes}
    guessed, notes = guessed_recipe(options.data, options.recipe, settings, options.pretrained)
    if is_main():
        print("".join(f"{'# ' if options.print else ''}{note}\n" for note in notes), end="")
    return guessed | ({"imports": recipe["imports"]} if "imports" in recipe else {})


def with_imports(recipe: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return `recipe` with the imported `names` added; its own must be among them or of this project."""
    from polyformer.models.plugins import absolute_import, require_imported

    both = dict.fromkeys(map(absolute_import, (*require_imported(recipe.get("imports")), *names)))
    return {**recipe, "imports": list(both)} if both else recipe


def named_settings(options: TrainOptions) -> dict[str, Any]:
    """Return the options that set values of the recipe, by the dotted name of the value."""
    settings = {
        "model": options.model,
        "training.steps": options.steps,
        "tuning": options.tuning,
        "seed": options.seed,
        "training.engine.device": options.device,
        "training.reporting.curves": options.plot or None,
        "training.reporting.report": options.report or None,
        "training.reporting.tracking": options.tracking and options.tracking.replace(" ", "").split(","),
    }
    return {name: value for name, value in settings.items() if value is not None}


EXAMPLES = """examples:
  polyformer train
  polyformer train --data notes.txt --steps 2000 --model decoder-small
  polyformer train --data reviews.csv
  polyformer train multi30k --data DIR --out runs/german --plot
  polyformer train wikitext2 --print > mine.yaml; polyformer train mine.yaml
  polyformer train --model.hidden_size 192 --optimizer.lr 1e-3 --training.engine.precision bf16
  polyformer train sst2 --data DIR --pretrained BERT-DIR --optimizer.lr 3e-5
  polyformer train --import mine.py --model.attention "Mine(8) | Window(64)"
  polyformer train --resume runs/demo-1
  polyformer train wikitext2 --data DIR --model longformer-decoder-small --stages 3 --out runs/long
  polyformer train longformer --data notes.txt --pretrained BERT-DIR --stages 3 --out runs/longer
"""


def after_restart(options: TrainOptions) -> TrainOptions:
    """Return the options; a process that torchrun restarted resumes the run in --out with its recipe."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not restarted or options.out is None or options.stages is not None:
        return options
    if not (Path(options.out) / "recipe.yaml").is_file():
        return options
    return TrainOptions(resume=options.out, imports=options.imports)


def run(options: TrainOptions) -> None:
    """Train the model, and print metrics and a sample."""
    from polyformer.training.engine import is_main
    from polyformer.training.recipes import Recipe
    from polyformer.training.run_control import ignore_sigusr1

    options = after_restart(options)
    recipe = Recipe.from_dict(recipe_data(options))
    if options.print:
        print(recipe.to_yaml(), end="")
        return
    recipe.model_config()  # raises errors of the model before data are read
    how: dict[str, Any] = {"from_step": options.from_step, "changed_data": options.changed_data}
    if options.stages is not None:
        if options.resume is not None:
            raise InputError("--stages: to resume stages, repeat the same command with their --out")
        how = {"stages": options.stages}
    with ignore_sigusr1():
        fitted = train(recipe, recipe_name(options), options.out, options.resume, **how)
        if is_main():
            conclude(fitted, recipe.seed)


def train(recipe: "Recipe", name: str, out: str | None, resume: str | None, **how: Any) -> "Fitted":
    """Train in the folder `out` or `resume`, by default a new folder named after `name`; `how`: see `fit`.

    After a signal, exit with the usual status, 128 + the signal's number.
    """
    from polyformer.training.machine import world
    from polyformer.training.recipes.fit import fit, fit_stages
    from polyformer.training.recipes.run import choose_device, new_folder
    from polyformer.training.run_control import Interrupted

    choose_device(recipe.training.engine.device)
    path = resume or out
    if path is None and world() > 1:
        raise InputError("--out is missing: with several processes, name the folder of the run")
    folder = Path(path) if path else new_folder(Path(name).stem)
    try:
        if "stages" in how:
            return fit_stages(recipe, folder, how["stages"])[-1]
        return fit(recipe, folder, resume=resume is not None, **how)
    except Interrupted as error:
        again, resumed = f"the same command and --out {folder}", f"polyformer train --resume {folder}"
        command = again if "stages" in how else resumed
        print(f"polyformer: {error}; resume with: {command}", file=sys.stderr)
        raise SystemExit(128 + error.signal) from None
    except KeyboardInterrupt:
        saved = any(folder.glob("checkpoints/step-*"))
        command = f"; resume with: polyformer train --resume {folder}" if saved else ""
        print(f"\npolyformer: interrupted{command}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if nothing was written


def conclude(fitted: Any, seed: int) -> None:
    """Print the metrics with baselines, if any, a sample of the model, and the folder."""
    from polyformer.training.recipes.report import baselines, sample, table, verdict
    from polyformer.training.tasks import ActionPrediction, ImageModelling, LanguageModelling

    rows = [(f"this model, {split}", metrics) for split, metrics in fitted.scores.items()]
    others = baselines(fitted.task, fitted.splits)
    said = verdict(fitted.task, others, fitted.scores["validation"]) if others else ""
    if others:
        fitted.run.record(baselines=dict(others), verdict=said)
    if rows:
        print(f"\n{table(others + rows)}")
    if said:
        print(f"\n{said}")
    if isinstance(fitted.task, LanguageModelling):
        print(f"\nA sample:\n{sample(fitted.task, fitted.model, seed)}")
    if isinstance(fitted.task, ImageModelling):
        print(f"\n{draw_images(fitted, seed)}")
    if isinstance(fitted.task, ActionPrediction) and fitted.task.config.environment is not None:
        print(f"\n{try_out_if_possible(fitted)}")
    print(f"\nSaved in {fitted.run.folder}")
    if fitted.run.recipe.training.reporting.report:
        from polyformer.cli.plots.report import write_report

        print(f"Report: {write_report(fitted.run)}")


def try_out_if_possible(fitted: Any) -> str:
    """Evaluate a Decision Transformer in its environment; return its results as text, or the error."""
    from polyformer.cli.commands.acting import evaluate_returns

    try:
        text, results = evaluate_returns(fitted.run, fitted.model.eval())
    except InputError as error:  # the environment is not here; the run is complete without it
        return f"Not evaluated in its environment: {error}"
    fitted.run.record(achieved={f"{asked:.6g}": returns for asked, returns in results.items()})
    return text


def draw_images(fitted: Any, seed: int) -> str:
    """Draw generated images into the run's folder; return a line with the path, or the error."""
    from polyformer.training.recipes.report import write_sheet

    path = fitted.run.folder / "images.png"
    try:
        write_sheet(path, fitted.task, fitted.model, fitted.splits, seed)
    except InputError as error:  # matplotlib is missing; the run is complete without it
        return f"No image sheet: {error}"
    return f"Held-out images in rows ({', '.join(fitted.task.pictures)}): {path}"
