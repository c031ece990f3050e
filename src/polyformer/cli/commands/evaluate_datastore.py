"""`evaluate --datastore`: a language model with and without its nearest neighbours."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.applications.retrieval import MixtureConfig, Store
    from polyformer.applications.retrieval.scoring import Targets


def measure(options: Any) -> None:
    """Print a table of perplexities, and the time per token."""
    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.applications.retrieval.scoring import measured
    from polyformer.applications.retrieval.stores import open_store
    from polyformer.core.ops.cpu_threads import model_threads
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
    """Raise `InputError` for options that contradict each other."""
    if options.tune and not (options.lambda_ is None and options.temperature is None):
        raise InputError("--tune chooses --lambda and --temperature; leave them out, or leave --tune out")


def tuned(options: Any, reader: Any, store: "Store", rows: list[Any]) -> "MixtureConfig":
    """Return the best mixture for --tune and save it in the store; add its perplexity to `rows`."""
    from polyformer.applications.retrieval import MixtureConfig
    from polyformer.applications.retrieval.scoring import measured

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
    from polyformer.models.architectures.training_record import RECIPE
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
