"""`evaluate` of texts: a language model with and without its nearest neighbours, and any checkpoint."""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.applications.retrieval import MixtureConfig, Store
    from polyformer.applications.retrieval.mixture import Targets
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks.base import Task, Workers


def measure(options: Any) -> None:
    """Print a table of perplexities, and the time per token."""
    from polyformer.applications.retrieval import open_store
    from polyformer.applications.retrieval.mixture import measured
    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.core.ops.cpu import model_threads
    from polyformer.training.recipes.report import table

    check(options)
    reader = open_reader(options.run, options.device)
    store = open_store(options.datastore or "", reader.fingerprints, options.search or "auto")
    sources = {} if options.tune and not options.data else measured_texts(options)
    rows: list[tuple[str, dict[str, float]]] = []
    with model_threads(reader.model):
        config = tuned(options, reader, store, rows) if options.tune else chosen(options, store)
        for name, texts in sources.items():
            counts, temperatures = (config.neighbours,), (config.temperature,)
            targets = measured(reader, store, texts, counts, temperatures, options.tokens)
            rows += perplexities(name, targets, float(targets.losses(config.weight)))
            print_speed(name, targets)
    print(table(rows))


def check(options: Any) -> None:
    """Raise `InputError` if --tune would choose what other options set."""
    if options.tune and not (options.lambda_ is None and options.temperature is None):
        raise InputError("--tune chooses --lambda and --temperature; leave them out, or leave --tune out")


def tuned(options: Any, reader: Any, store: "Store", rows: list[Any]) -> "MixtureConfig":
    """Return the best mixture for --tune and save it in the store; add its perplexity to `rows`."""
    from polyformer.applications.retrieval import MixtureConfig
    from polyformer.applications.retrieval.mixture import measured

    assert options.tune is not None
    neighbours = MixtureConfig().neighbours if options.neighbours is None else options.neighbours
    source = texts_of(options.tune, options.format)
    targets = measured(reader, store, source, (neighbours,), None, options.tokens)
    config, loss = targets.best()
    try:
        store.keep_mixture(config)
    except InputError as error:
        print(f"not saved: {error}", file=sys.stderr)
    print(
        f"--lambda {config.weight:g} --temperature {config.temperature:.6g} --neighbours {config.neighbours}"
    )
    rows += perplexities(options.tune, targets, loss)
    print_speed(options.tune, targets)
    return config


def chosen(options: Any, store: "Store") -> "MixtureConfig":
    """Return the mixture of the options, with the store's saved mixture as defaults."""
    from polyformer.applications.retrieval import MixtureConfig

    return MixtureConfig.chosen(
        store.mixture(), options.lambda_, options.temperature, options.neighbours, "--temperature"
    )


def measured_texts(options: Any) -> dict[str, Iterator[str]]:
    """Return the texts to evaluate on: --data, or validation and test data of the run's recipe."""
    from polyformer.data import load
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.run import Run

    if options.data is not None:
        return {options.data: texts_of(options.data, options.format)}
    if not (Path(options.run) / RECIPE).is_file():
        raise InputError("--data or --tune is missing: a checkpoint has no validation data; name a text")
    recipe = Run.open(options.run).recipe
    splits = load(recipe.data, ("text",))
    parts = {"validation": splits.validation, "test": splits.test}
    return {
        name: (str(dict(row)["text"]) for row in rows) for name, rows in parts.items() if rows is not None
    }


def texts_of(path: str, format: str | None) -> Iterator[str]:
    """Yield the documents of a source lazily."""
    from polyformer.data import DataConfig, read

    data = DataConfig.from_dict({"path": path, "format": format, "streaming": True}, "data")
    return (str(dict(row)["text"]) for row in read(data, ("text",), data.path))


def perplexities(name: str, targets: "Targets", loss: float) -> list[tuple[str, dict[str, float]]]:
    """Return two rows of the table: without and with the store."""
    from polyformer.training.tasks.metrics import perplexity_metrics

    count = len(targets.log_p)
    baseline = perplexity_metrics(-float(targets.log_p.double().sum()), count)
    return [(name, baseline), (f"{name}, with neighbours", perplexity_metrics(loss * count, count))]


def print_speed(name: str, targets: "Targets") -> None:
    """Print the milliseconds per token of the data `name` on standard error."""
    model, search = (1e3 * seconds / len(targets.log_p) for seconds in targets.seconds)
    print(f"{name}: {model:.2f} ms per token in the model, {search:.2f} ms in the search", file=sys.stderr)


def measure_checkpoint(options: Any, shared: "Workers") -> None:
    """Print loss and perplexity per token of a language model that was not trained by a run.

    The windows of --length tokens are independent. Each predicts the next token at every position, so that
    every token of the text except the first is predicted exactly once. The processes share the batches.
    With a --cache that drops keys, windows overlap by half, which is the prompt of the other half.
    """
    import torch

    from polyformer.applications.retrieval.mixture import batched, contexts
    from polyformer.applications.retrieval.readers import cache_policy, cached_log_p, open_reader, windows
    from polyformer.cli.commands.processes import report, resumable
    from polyformer.core.ops.cpu import model_threads
    from polyformer.training.recipes.report import table
    from polyformer.training.tasks.metrics import perplexity_metrics

    check(options)
    if options.data is None:
        raise InputError("--data is missing: a checkpoint has no validation data; name a text")
    reader = open_reader(options.run, options.device)
    reading = reader.reading(options.length, 0)
    policy = None if options.cache is None else cache_policy(reader, options.cache, "--cache")
    if policy is not None and policy.drops_keys:
        reading = reader.reading(reading.length, reading.length // 2)
    every = windows(reader.documents(texts_of(options.data, options.format)), reading)
    settings = {"length": reading.length, "isolated": reader.isolated, "cache": options.cache}
    shared = resumable(options.progress, shared, reader.model, [reader.config, settings])

    def sums(batch: list[Any]) -> torch.Tensor:
        if policy is None:
            _, _, log_p = contexts(reader, batch)
        else:
            log_p = torch.cat([cached_log_p(reader, window, policy) for window in batch])
        return torch.tensor([-float(log_p.double().sum()), len(log_p)], dtype=torch.float64)

    zero = torch.zeros(2, dtype=torch.float64, device=next(reader.model.parameters()).device)
    with model_threads(reader.model):
        batches = batched(every, reading.fresh, options.tokens)
        nats, count = shared.total(sums, batches, zero)
    report(shared)
    if not count:
        raise InputError(f"{options.data}: too short: at least two tokens are required; name a longer text")
    if not shared.rank:
        print(table([(options.data, {**perplexity_metrics(nats, count), "tokens": int(count)})]))


@contextmanager
def with_neighbours(options: Any, run: "Run", parts: Mapping[str, Sequence[Any]]) -> "Iterator[Task]":
    """Yield the run's task (SPALM) with the neighbours of `parts`, the rows of text by their files."""
    from polyformer.applications.retrieval import open_store
    from polyformer.applications.retrieval.neighbours import find
    from polyformer.applications.retrieval.readers import open_own_reader
    from polyformer.data import DataConfig
    from polyformer.data.sources.checks import fingerprint
    from polyformer.training.tasks import LanguageModelling

    task = run.task_of(LanguageModelling)
    if not task.config.neighbours:
        raise InputError(
            f"{options.run}: trained without neighbours; leave out --frozen to mix neighbours in"
        )
    reader = open_own_reader(options.frozen, run.tokenizer, options.device)
    store = open_store(options.datastore, reader.fingerprints, options.search or "auto")
    count = 4 if options.neighbours is None else options.neighbours
    with tempfile.TemporaryDirectory() as name:
        folders = []
        for path, rows in parts.items():
            files = tuple(fingerprint(DataConfig(path=path), ("text",))["path"])
            folders.append(str(Path(name) / str(len(folders))))
            find(reader, (row["text"] for row in rows), files, store, count, Path(folders[-1]))
        config = dataclasses.replace(task.config, neighbours=tuple(folders))
        yield LanguageModelling(config, run.tokenizer)
