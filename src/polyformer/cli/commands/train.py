"""Train a model from a recipe.

RECIPE is the name of a recipe in the package (see `polyformer list recipe`) or your own YAML file. The
default is `demo`: it trains a small language model on the source code of Python's standard library and writes
a page about the run. With only --data, format, columns and task are guessed from the data, and the guess is
printed (docs/data.md). The folder of the run contains everything that `evaluate`, `generate` and other
commands need (docs/runs.md).
"""

import os
from pathlib import Path
from typing import Any

from polyformer.cli.commands.recipe_options import TrainOptions, recipe_data, recipe_name
from polyformer.core.errors import InputError

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
    from polyformer.cli.commands.training_run import conclude, train
    from polyformer.training.engine import is_main
    from polyformer.training.recipes import Recipe
    from polyformer.training.signals import ignore_sigusr1

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
