"""Train a model from a recipe.

The recipe is one of the package's (see `polyformer list`) or a YAML file of your own; without one, a small
language model is trained on the text that comes with Python, or with --data what fits the data: their
format, columns and task are guessed, and what was guessed is said (docs/data.md). The run's folder then
holds everything that `evaluate`, `generate` and the others need.
"""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.commands.base import argument, changes, imports, option
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.recipes import Recipe
    from polyformer.recipes.fit import Fitted

EXAMPLES = """examples:
  polyformer train
  polyformer train --data notes.txt --steps 2000 --model decoder-small
  polyformer train --data reviews.csv
  polyformer train multi30k --data DIR --out runs/german --plot
  polyformer train wikitext2 --print > mine.yaml; polyformer train mine.yaml
  polyformer train --model.hidden_size 192 --optimizer.lr 1e-3 --training.engine.precision bf16
  polyformer train sst2 --data DIR --pretrained BERT-DIR --optimizer.lr 3e-5
  polyformer train --import mine.py --model.attention "Mine(8) | Window(64)"
  polyformer train --resume runs/default-1
  polyformer train wikitext2 --data DIR --model longformer-decoder-small --stages 3 --out runs/long
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: str | None = argument("name of a recipe, or a .yaml file (default: default)", None)
    data: str | None = option(
        "what to train on, a file or a directory; or the directory with the files that the recipe names"
    )
    model: str | None = option("preset to train, in place of the recipe's model")
    pretrained: str | None = option("checkpoint to start from, with its tokenizer, in place of the model")
    steps: int | None = option("updates of the weights")
    out: str | None = option("folder of the run (default: runs/NAME-NUMBER)")
    resume: str | None = option("folder of a run to go on with, from its last checkpoint")
    from_step: int | None = option(
        "with --resume: go on from the checkpoint of this step, and drop later ones"
    )
    changed_data: bool = option("with --resume: go on although the data have changed since", False)
    seed: int | None = option("seed of weights, order of data, and dropout")
    device: Literal["auto", "cpu", "cuda"] | None = option(
        "where to compute (default: CUDA where there is one)"
    )
    stages: int | None = option(
        "train so many stages into --out, each with windows and rows twice as long at half the rate; "
        "the same command again goes on"
    )
    plot: bool = option("draw the curves to curves.png in the end", False)
    print: bool = option("print the whole recipe as YAML and stop", False)
    imports: tuple[str, ...] = imports()
    changes: dict[str, Any] = changes(
        "--any.nested.key VALUE changes one value of the recipe, such as --training.clip 0.5"
    )


def run(options: Options) -> None:
    from polyformer.recipes import Recipe
    from polyformer.training.engine import is_main
    from polyformer.training.signals import surviving_warnings

    recipe = Recipe.from_dict(described(options))
    if options.print:
        print(recipe.to_yaml(), end="")
        return
    recipe.model_config()  # an unknown preset or option is said before data are read
    how: dict[str, Any] = {"from_step": options.from_step, "changed_data": options.changed_data}
    if options.stages is not None:
        if options.resume is not None:
            raise InputError("--stages: to go on with stages, give the same command again with their --out")
        how = {"stages": options.stages}
    with surviving_warnings():
        fitted = train(recipe, options.recipe or "default", options.out, options.resume, **how)
        if is_main():
            conclude(fitted, recipe.seed)


def described(options: Options) -> dict[str, Any]:
    """The recipe that the options describe, as plain data."""
    from polyformer.recipes.find import absolute, find_recipe, recipe_names, with_data
    from polyformer.recipes.guessed import guessed_recipe
    from polyformer.recipes.recipe import merged, nested
    from polyformer.recipes.run import Run
    from polyformer.training.engine import is_main

    if options.resume is None and (options.from_step is not None or options.changed_data):
        flag = "--changed-data" if options.from_step is None else "--from-step"
        raise InputError(f"{flag}: it says how to go on with a run; name the run by --resume")
    if options.resume is not None:
        if options.recipe or options.out:
            raise InputError("--resume: the run has its own recipe and folder; leave RECIPE and --out away")
        recipe = Run.open(options.resume).recipe.to_dict()
    else:
        recipe = find_recipe(options.recipe or "default", pretrained=options.pretrained is not None)
        recipe = with_imports(recipe, options.imports)
    data = recipe.get("data") or {}
    if options.data is not None and options.resume is None and not data.get("path"):
        stated = {**_explicit(options), **options.changes}
        own = {"imports": recipe["imports"]} if "imports" in recipe else {}
        recipe, said = guessed_recipe(options.data, options.recipe, stated, options.pretrained is not None)
        recipe |= own
        if is_main():
            print("".join(f"{'# ' if options.print else ''}{line}\n" for line in said), end="")
    elif options.data is not None:
        recipe["data"] = with_data(data, options.data)
    elif (
        options.recipe in recipe_names()
        and data.get("path")
        and "data.path" not in options.changes
        and not options.print
    ):
        raise InputError(f"{options.recipe}: name the directory with its data ({data['path']}) by --data DIR")
    for name, value in _explicit(options).items():
        recipe = merged(recipe, nested(name, value))
    if options.pretrained is not None:
        if options.model is not None:
            raise InputError("--pretrained: a checkpoint is a model already; leave --model away")
        recipe |= {"model": {"pretrained": options.pretrained}, "tokenizer": {"path": options.pretrained}}
    for name, value in options.changes.items():
        recipe = merged(recipe, nested(name, value))
    if isinstance(recipe.get("data"), dict) and not options.print:
        recipe["data"] = absolute(recipe["data"])
    return recipe


def with_imports(recipe: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """`recipe` with everything imported that it names, and with `names`, which are imported already."""
    from polyformer.core.config import decode
    from polyformer.plugins import absolute, import_named

    own = decode(tuple[str, ...], recipe.get("imports") or (), "imports")
    for name in own:
        import_named(name)
    both = dict.fromkeys(map(absolute, (*own, *names)))
    return {**recipe, "imports": list(both)} if both else recipe


def _explicit(options: Options) -> dict[str, Any]:
    """The options with a name of their own, as dotted names."""
    named = {
        "model": options.model,
        "training.steps": options.steps,
        "seed": options.seed,
        "training.engine.device": options.device,
        "training.reporting.curves": options.plot or None,
    }
    return {name: value for name, value in named.items() if value is not None}


def train(recipe: "Recipe", name: str, out: str | None, resume: str | None, **how: Any) -> "Fitted":
    """Train in the folder `out` or `resume`, by default a new one called after `name`; `how`: see `fit`.

    Interrupted by a signal, it exits with 128 and the signal's number, as is usual.
    """
    from polyformer.recipes.fit import fit, world
    from polyformer.recipes.run import choose_device, new_folder
    from polyformer.recipes.stages import fit_stages
    from polyformer.training.signals import Interrupted

    choose_device(recipe.training.engine.device)
    given = resume or out
    if given is None and world() > 1:
        raise InputError("--out: with several processes, name the folder of the run")
    folder = Path(given) if given else new_folder(Path(name).stem)
    try:
        if "stages" in how:
            return fit_stages(recipe, folder, how["stages"])[-1]
        return fit(recipe, folder, resume=resume is not None, **how)
    except Interrupted as error:
        way = (
            f"the same command and --out {folder}"
            if "stages" in how
            else f"polyformer train --resume {folder}"
        )
        print(f"polyformer: {error}; go on with: {way}", file=sys.stderr)
        raise SystemExit(128 + error.signal) from None
    except KeyboardInterrupt:
        way = (
            f"; go on with: polyformer train --resume {folder}"
            if any(folder.glob("checkpoints/step-*"))
            else ""
        )
        print(f"\npolyformer: interrupted{way}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where nothing was written


def conclude(fitted: Any, seed: int) -> None:
    """Print what was reached, what a model of text or images makes by itself, and where everything lies."""
    from polyformer.recipes.report import baselines, sample, table
    from polyformer.recipes.sheet import image_baselines
    from polyformer.tasks import ImageModelling, LanguageModelling

    rows = [(f"this model, {split}", metrics) for split, metrics in fitted.scores.items()]
    others: list[tuple[str, dict[str, float]]] = []
    if isinstance(fitted.task, LanguageModelling):
        others = baselines(fitted.task, fitted.splits)
    elif isinstance(fitted.task, ImageModelling):
        others = image_baselines(fitted.task, fitted.splits)
    if others:
        fitted.run.record(baselines=dict(others))
        rows = others + rows
    if rows:
        print(f"\n{table(rows)}")
    if isinstance(fitted.task, LanguageModelling):
        print(f"\nA sample:\n{sample(fitted.task, fitted.model, seed)}")
    if isinstance(fitted.task, ImageModelling):
        print(f"\n{drawn(fitted, seed)}")
    print(f"\nSaved in {fitted.run.folder}")


def drawn(fitted: Any, seed: int) -> str:
    """Draw completed images into the run's folder and say where, or why not."""
    from polyformer.recipes.sheet import write_sheet

    path = fitted.run.folder / "images.png"
    try:
        write_sheet(path, fitted.task, fitted.model, fitted.splits, seed)
    except InputError as error:  # without matplotlib the run is as good
        return f"No sheet of images: {error}"
    return f"Held-out images, their upper halves, and these completed: {path}"
