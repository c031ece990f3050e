"""Evaluate a trained model: print the metrics of its task on validation and test data.

Losses are in nats (natural logarithm) per predicted token or text; accuracy and F1 are between 0 and 1.

For a checkpoint (a directory or a GGUF file), prints the perplexity of --data, read in windows of --length
tokens. With --datastore, prints the perplexity of a language model with and without its nearest neighbours,
p = lambda p_kNN + (1 - lambda) p_LM with p_kNN from exp(-squared distance / temperature), reading the text in
the same windows as the store's text. --tune chooses lambda and temperature on another text and saves them in
the store. A Decision Transformer is also evaluated in its environment: the table compares target and achieved
returns, which returns.png shows. For a masked diffusion model the loss and the perplexity are upper bounds,
with a standard error of the loss for the random choice of masks.

--data is read like the data of the run: the same columns, in the format of its own files. --report writes
report.html, a page about the run with all its evaluations.

With --progress DIR, the same command resumes an interrupted evaluation (but episodes start again). Several
processes (torchrun --nproc-per-node N -m polyformer evaluate ...) share the data; the results are the same.
"""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import Device, argument, data_settings, device, option, refuse
from polyformer.cli.commands.processes import refuse_several, workers
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import COUNT, NonNegativeInt, PositiveFloat, PositiveInt, Share

if TYPE_CHECKING:
    from polyformer.training.recipes import Recipe
    from polyformer.training.recipes.run import Run
    from polyformer.training.task import Workers

EXAMPLES = """examples:
  polyformer evaluate runs/demo-1
  polyformer evaluate runs/sst2 --data reviews.tsv
  polyformer evaluate runs/sst2 --data new.csv --data.header '[label, text]' --report
  polyformer evaluate model.gguf --data valid.txt --length 2048 --tokens 16384
  polyformer evaluate model.gguf --data valid.txt --length 1024 --cache int8
  polyformer evaluate LLAMA-DIR --datastore stores/wikitext2 --tune valid.txt.gz --data test.txt.gz
  polyformer evaluate runs/wikitext2 --datastore stores/wikitext2 --lambda 0.25 --temperature 10
  polyformer evaluate runs/summaries --data articles.tsv --progress evaluations
  polyformer evaluate runs/xl --memory-length 1024
  polyformer evaluate runs/spalm --data new.txt --frozen runs/wikitext2 --datastore stores/wikitext2
  polyformer evaluate runs/memorizing --store-size 65536
  polyformer evaluate runs/diffusion-1 --samples 32
  polyformer evaluate runs/dt --returns 100,300,500 --episodes 50
  polyformer evaluate runs/gtrxl-1 --episode episode.gif
  polyformer evaluate model.gguf --tasks my_task --task-folder tasks/ --cache "snapkv(budget=512)"
"""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `polyformer evaluate`."""

    run: str = argument("folder of a trained run, or a checkpoint of a language model", metavar="RUN")
    data: str | None = option(
        "file or directory to evaluate on (default: validation and test data of the run's recipe)",
        metavar="PATH",
    )
    datastore: str | None = option("mix in the nearest neighbours of this store", metavar="STORE")
    tune: str | None = option("with --datastore: choose lambda and temperature on this text", metavar="PATH")
    lambda_: Share | None = option("with --datastore: weight of the neighbours (default: as tuned)")
    temperature: PositiveFloat | None = option(
        "with --datastore: temperature of the neighbours' weights (default: as tuned)"
    )
    neighbours: PositiveInt | None = option(
        "with --datastore: number of neighbours (default: as tuned, or 1024; with --frozen 4)"
    )
    search: Literal["auto", "flat", "index"] | None = option(
        "with --datastore: search with its index, or exhaustively (flat) (default: auto)"
    )
    length: int | None = option(
        "for a checkpoint: tokens per window (default: 512, or the model's limit if smaller)", metavar="N"
    )
    tokens: PositiveInt | None = option(
        "for a checkpoint or with --datastore: evaluate on the first N tokens of a text (default: all)",
        most=COUNT,
    )
    format: str | None = option(
        "for a checkpoint or with --datastore: format of the texts, if their names do not show it"
    )
    cache: str | None = option(
        "for a checkpoint: read through KV caches with this policy, such as 'int8' or 'snapkv(budget=256)'; "
        "if it drops keys, the first half of a window is a prompt",
        metavar="POLICY",
    )
    tasks: str | None = option(
        "for a language model: run these tasks of lm-eval, separated by commas, and print its table",
        metavar="NAME,NAME,...",
    )
    task_folder: str | None = option("with --tasks: a folder of task files besides lm-eval's", metavar="DIR")
    shots: NonNegativeInt | None = option("with --tasks: demonstrations (default: the task's own number)")
    limit: PositiveInt | None = option("with --tasks: questions of each task (default: all)", most=COUNT)
    frozen: str | None = option(
        "with --datastore and --data, for a model trained with neighbours (SPALM): the run that built the "
        "store, which also computes the queries",
        metavar="RUN",
    )
    memory_length: int | None = option(
        "for a model with a memory: tokens in the memory of every layer (default: as in training)",
        metavar="N",
    )
    store_size: int | None = option(
        "for a model with the memory 'memorizing': tokens in its store (default: as in training)", metavar="N"
    )
    samples: int | None = option(
        "for masked diffusion: masks drawn for each row, 2 or more; the standard error falls with their root "
        "(default: as in the recipe)",
        most=COUNT,
    )
    returns: str | None = option(
        "for a Decision Transformer: target returns, separated by commas (default: minimum, quartiles and "
        "maximum of the training episodes)",
        metavar="RETURNS",
    )
    episodes: int | None = option("for a Decision Transformer: episodes per target return (default: 20)")
    environment: str | None = option(
        "for a Decision Transformer: gymnasium environment (default: the environment of the training data)",
        metavar="ID",
    )
    max_steps: int | None = option(
        "for a Decision Transformer: largest number of steps per episode", most=COUNT
    )
    episode: str | None = option(
        "for an agent: draw an episode and its attention: .gif with one frame per step, or .png, .svg, .pdf",
        metavar="FILE",
        output="file",
    )
    progress: str | None = option(
        "save intermediate results in this folder, so that the same command, with any number of processes, "
        "resumes an interrupted evaluation",
        metavar="DIR",
        output="folder",
    )
    report: bool = option("write report.html, a page about the run with this evaluation", False)
    device: Device = device()
    changes: dict[str, Any] = data_settings()


ACTING = "returns", "episodes", "environment", "max_steps"
DATASTORE = "tune", "lambda_", "temperature", "neighbours", "search"
CHECKPOINT = "length", "tokens", "format", "cache"
HARNESS = "task_folder", "shots", "limit"


def run(options: EvaluateOptions) -> None:
    """Print a table of metrics."""
    if options.frozen is not None and (options.datastore is None or options.data is None):
        raise InputError("--frozen: requires --datastore and --data")
    if options.tasks is not None:
        return run_tasks(options)
    refuse(options, HARNESS, "requires --tasks")
    if options.datastore is not None:
        refuse_several("--datastore")
    if options.progress is not None:
        for name in ("datastore", "episode"):
            if getattr(options, name) is not None and options.frozen is None:
                raise InputError(f"--progress: not available with --{name}")
    if options.datastore is not None and options.frozen is None:
        names = ("memory_length", "store_size", "samples", "length", "cache", "report")
        refuse(options, names, "not available with --datastore")
        refuse_settings(options, "not available with --datastore")
        from polyformer.cli.commands.datastore import measure

        return measure(options)
    if options.frozen is None:
        refuse(options, DATASTORE, "requires --datastore")
    else:
        refuse(options, DATASTORE[:3], "requires --datastore and no --frozen")
    with workers(options.device) as shared:
        if not measure_checkpoint(options, shared):
            measure_run(options, shared)


def run_tasks(options: EvaluateOptions) -> None:
    """Print lm-eval's table for tasks on a language model."""
    from polyformer.applications.harness import HarnessSettings, evaluate_tasks, results_table
    from polyformer.core.ops.cpu import model_threads
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks.lm import LanguageModelling

    refuse_several("--tasks")
    others = ("data", "datastore", "tokens", "format", "frozen", "memory_length", "store_size", "progress")
    refuse(
        options, (*others, "samples", *DATASTORE, *ACTING, "episode", "report"), "not available with --tasks"
    )
    refuse_settings(options, "not available with --tasks")
    assert options.tasks is not None
    settings = HarnessSettings(
        folder=options.task_folder,
        shots=options.shots,
        limit=options.limit,
        cache=options.cache,
        max_length=options.length,
    )
    task, model = writer(options.run, LanguageModelling, options.device)
    with model_threads(model):
        results = evaluate_tasks(task, model, options.tasks.replace(" ", "").split(","), settings)
    print(results_table(results))


def refuse_settings(options: EvaluateOptions, why: str) -> None:
    """Raise `InputError` if a setting of the data is set."""
    for name in options.changes:
        raise InputError(f"--{name}: {why}")


def measure_run(options: EvaluateOptions, shared: "Workers") -> None:
    """Print the metrics of a run; the processes share its held-out data."""
    from polyformer.cli.commands.processes import report, resumable
    from polyformer.core.ops.cpu import model_threads
    from polyformer.nn.memory.base import set_length
    from polyformer.nn.memory.memorizing import set_store
    from polyformer.training.recipes.report import table
    from polyformer.training.recipes.run import Run

    run = Run.open(options.run)
    if options.report and not run.finished:
        raise InputError(
            f"--report: this run has not ended; resume with: polyformer train --resume {run.folder}"
        )
    kind = run.recipe.task.kind
    if kind != "act":
        why = f"requires a run of the task 'act', and {options.run} has the task {quote(kind)}"
        refuse(options, ACTING, why)
    if options.episode is not None:
        from polyformer.cli.commands.acting import draw

        refuse_several("--episode")
        return draw(options.episode, run, run.measured(options.device))
    model, recipe = run.measured(options.device), run.recipe
    parts, files = held_out_rows(options, recipe)
    if options.memory_length is not None:
        set_length(model, options.memory_length)
    if options.store_size is not None:
        set_store(model, options.store_size)
    if options.samples is not None:
        set_samples(run, options.samples)
    source = nullcontext(run.task)
    if options.frozen is not None:
        from polyformer.cli.commands.datastore import with_neighbours

        source = with_neighbours(options, run, {files[name]: rows for name, rows in parts.items()})
    with model_threads(model), source as task:
        if (
            options.progress is not None
            and task.rows.continues
            and getattr(model, "supports_recurrence", False)
        ):
            raise InputError(
                "--progress: a model with a memory must read its text from start to end; leave it out"
            )
        settings = [recipe.to_dict(), options.memory_length, options.store_size, options.samples]
        shared = resumable(options.progress, shared, model, settings)
        scores = [(name, task.score(model, rows, shared)) for name, rows in parts.items() if rows is not None]
    report(shared)
    if not scores:
        raise InputError(f"{options.run}: its recipe has no validation or test data; name them with --data")
    if shared.rank:
        return
    print(table(scores))
    if kind == "act":
        from polyformer.cli.commands.acting import try_out

        try_out(run, model, options)
    if options.report:
        report_on(run, dict(scores))


def set_samples(run: "Run", samples: int) -> None:
    """Set the number of masks for each row; raise `InputError` for a run of another task."""
    from annotated_types import Ge

    from polyformer.core.ranges import check_range
    from polyformer.training.tasks.diffusion import LikelihoodBound

    metrics = run.task.metrics
    if not isinstance(metrics, LikelihoodBound):
        kind = quote(run.recipe.task.kind)
        raise InputError(
            f"--samples: requires a run of the task 'masked_diffusion', and {run.folder} has {kind}"
        )
    check_range("--samples", samples, Ge(2))
    metrics.samples = samples


def report_on(run: "Run", scores: dict[str, dict[str, float]]) -> None:
    """Record the metrics of an evaluation, and write the report of the run."""
    from polyformer.cli.plots.report import write_report

    run.record(evaluations={**run.facts.get("evaluations", {}), **scores})
    print(f"Report: {write_report(run)}")


def held_out_rows(options: EvaluateOptions, recipe: "Recipe") -> "tuple[dict[str, Any], dict[str, str]]":
    """Return the rows to evaluate on, and with --data their files, by their names."""
    from polyformer.data import DataConfig, load, read
    from polyformer.training.recipes.guessed import for_another_source
    from polyformer.training.recipes.recipe import merged, with_changes

    kind, needs, own = recipe.task.kind or "", recipe.task.needs, recipe.task.own_data
    if own is not None:
        why = f"the task {quote(kind)} generates its own data; leave it out"
        refuse(options, ("data",), why)
        refuse_settings(options, why)
        return {"validation": own.validation, "test": own.test}, {}
    changes = with_changes({}, options.changes).get("data", {})
    if options.data is None:
        splits = load(DataConfig.from_dict(merged(recipe.data.to_dict(), changes), "data"), needs)
        return {"validation": splits.validation, "test": splits.test}, {}
    data, notes = for_another_source(recipe.data, options.data, changes, kind)
    print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
    named = {"validation": data.validation, "test": data.test}
    parts = {split: read(data, needs, path, split) for split, path in named.items() if path}
    parts = parts or {options.data: read(data, needs, data.path, "test")}
    return parts, {name: named.get(name) or options.data for name in parts}


def measure_checkpoint(options: EvaluateOptions, shared: "Workers") -> bool:
    """Evaluate a checkpoint and return True; return False for a run. Raise `InputError` for other options."""
    from polyformer.models.architectures.pretrained import CONFIG
    from polyformer.training.recipes.run import is_checkpoint

    folder = Path(options.run)
    if not is_checkpoint(folder) or (folder.is_dir() and not {*folder.glob(CONFIG), *folder.glob("*.gguf")}):
        if options.datastore is None:
            refuse(options, CHECKPOINT, "only for a checkpoint or with --datastore; leave it out")
        return False
    names = ("frozen", "memory_length", "store_size", "samples", "report", *ACTING)
    refuse(options, names, "not available for a checkpoint; leave it out")
    refuse_settings(options, "not available for a checkpoint; leave it out")
    from polyformer.cli.commands import datastore

    datastore.measure_checkpoint(options, shared)
    return True
