"""`fit`: a recipe made into a trained model, in a folder of its own."""

import dataclasses
import os
from pathlib import Path

import torch
from torch import nn

from polyformer.checkpoints import start_from
from polyformer.core.files import read_tensors
from polyformer.core.weights import load_weights
from polyformer.data import Splits, load
from polyformer.model import WEIGHTS, Transformer
from polyformer.recipes.distill import Distilling
from polyformer.recipes.recipe import Recipe
from polyformer.recipes.run import Run
from polyformer.recipes.student import take_layers
from polyformer.tasks import Fitting, TextTask
from polyformer.training import Result, train

Scores = dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A finished run: its parts in memory, and its metrics by split ("validation", "test")."""

    run: Run
    task: TextTask
    splits: Splits
    model: Transformer
    result: Result
    scores: Scores


def fit(recipe: Recipe, out: str | Path, resume: bool = False, start: str | Path | None = None) -> Fitted:
    """Train what `recipe` describes, into the folder `out`; `resume` goes on with the run there.
    `start` is the folder of another run, whose tokenizer and weights a new one begins with; a recipe with a
    teacher begins with that one's (see `distill`).

    The folder then holds all that `polyformer.recipes.Run` and `from_pretrained` read. Under `torchrun` every
    process calls this alike, and the first one writes.
    """
    splits = load(recipe.data, recipe.task.needs)
    recipe = dataclasses.replace(recipe, task=recipe.task.resolve(splits.train))
    train_rows, choice = splits.train, recipe.tokenizer
    lesson = recipe.distillation
    known = out if resume else start or (lesson and lesson.teacher)
    tokenizer = recipe.task.tokenizer(choice, train_rows) if known is None else Run.open(known).tokenizer
    task = recipe.task.build(tokenizer)
    base = recipe.model.config()
    config = task.adapt(base)
    if recipe.model.pretrained is not None and base.vocab_size > config.vocab_size:
        config = dataclasses.replace(config, vocab_size=base.vocab_size)  # some tables have rows to spare
    with torch.random.fork_rng():  # the seed is this run's, not the program's
        torch.manual_seed(recipe.seed)
        model = Transformer(config)
    if recipe.model.pretrained is not None and not resume:
        report = start_from(recipe.model.pretrained, model)
        if is_main():
            print(f"from {recipe.model.pretrained}\n{report}")
    if start is not None:
        load_weights(model, read_tensors(Path(start) / WEIGHTS), Path(start) / WEIGHTS)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed + 1)  # a helper's weights are not the model's
        joined = task.join(model)
    fitting = Fitting(task, splits, recipe.seed)
    if lesson is not None:
        teacher = Run.open(lesson.teacher).model("cpu")
        take_layers(model, teacher)
        fitting = Distilling(task, splits, recipe.seed, model, teacher, lesson)
    # Nothing is written before all that can be wrong with the input was found.
    run = Run(Path(out))
    if is_main():
        run.begin(recipe, tokenizer, resume)
    result = train(
        joined, fitting, recipe.training, recipe.optimizer, recipe.schedule, out, recipe.seed, resume
    )
    scores: Scores = {}
    if is_main():
        model.save_pretrained(out)
        for name, helper in task.helpers(joined).items():
            helper.save_pretrained(run.folder / name)
        scores = score(task, joined, splits, result.metrics)
        facts = {"parameters": sum(one.numel() for one in model.parameters()), "steps": result.step}
        run.record(**facts, metrics=scores)
    return Fitted(run, task, splits, model, result, scores)


def score(task: TextTask, model: nn.Module, splits: Splits, measured: dict[str, float]) -> Scores:
    """The final metrics of every split; `measured`: what is known already of the validation split."""
    scores: Scores = {}
    if splits.validation is not None:
        scores["validation"] = {**measured, **task.finish(model, splits.validation)}
    if splits.test is not None:
        scores["test"] = task.score(model, splits.test)
    return scores


def is_main() -> bool:
    """Whether this process is the only one of its run, or the first."""
    return int(os.environ.get("RANK", "0")) == 0


def world() -> int:
    """How many processes the run has."""
    return int(os.environ.get("WORLD_SIZE", "1"))
