"""Evaluate a trained model: the metrics of its task on validation and test data."""

from dataclasses import dataclass
from typing import Literal

from polyformer.commands.base import argument, option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer evaluate runs/default-1
  polyformer evaluate runs/sst2 --data reviews.tsv
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    run: str = argument("folder of a run")
    data: str | None = option(
        "what to measure on (default: the validation and test data of the run's recipe)"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.data import DataConfig, load, read
    from polyformer.ops.workers import suited
    from polyformer.recipes.find import with_data
    from polyformer.recipes.report import table
    from polyformer.recipes.run import Run

    run = Run.open(options.run)
    model, recipe = run.measured(options.device), run.recipe
    needs = recipe.task.needs
    if options.data is None:
        splits = load(recipe.data, needs)
        found = {"validation": splits.validation, "test": splits.test}
    else:
        data = DataConfig.from_dict(with_data(recipe.data.to_dict(), options.data), "data")
        named = {"validation": data.validation, "test": data.test}
        found = {split: read(data, needs, path, split) for split, path in named.items() if path}
        found = found or {options.data: read(data, needs, data.path, "test")}
    with suited(model):
        scores = [(name, run.task.score(model, rows)) for name, rows in found.items() if rows is not None]
    if not scores:
        raise InputError(f"{options.run}: its recipe names no validation or test data; name some with --data")
    print(table(scores))
