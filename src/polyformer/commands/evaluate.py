"""Evaluate a trained model: print the metrics of its task on validation and test data.

Losses are in nats (natural logarithm) per predicted token or text; accuracy and F1 are shares from 0 to 1.
"""

from dataclasses import dataclass

from polyformer.commands.options import Device, argument, device, option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer evaluate runs/demo-1
  polyformer evaluate runs/sst2 --data reviews.tsv
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer evaluate` takes."""

    run: str = argument("folder of a trained run", metavar="RUN")
    data: str | None = option(
        "file or directory to measure on (default: validation and test data of the run's recipe)",
        metavar="PATH",
    )
    device: Device = device()


def run(options: Options) -> None:
    """Print a table of metrics."""
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
        parts = {"validation": splits.validation, "test": splits.test}
    else:
        data = DataConfig.from_dict(with_data(recipe.data.to_dict(), options.data), "data")
        named = {"validation": data.validation, "test": data.test}
        parts = {split: read(data, needs, path, split) for split, path in named.items() if path}
        parts = parts or {options.data: read(data, needs, data.path, "test")}
    with suited(model):
        scores = [(name, run.task.score(model, rows)) for name, rows in parts.items() if rows is not None]
    if not scores:
        raise InputError(f"{options.run}: its recipe names no validation or test data; name some with --data")
    print(table(scores))
