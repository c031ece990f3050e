"""Build a datastore of a text for a causal model: the next token of every context (kNN-LM).

`build` reads TEXT with MODEL, a run or a checkpoint, and saves one entry per token. To resume an interrupted
build, repeat the same command. With --part I --parts N, N processes build one part each, and `merge` joins
the parts in STORE. `index` makes searches fast (requires faiss). `verify` compares the whole store with its
checksums. Use the store with --datastore of `polyformer evaluate` and `polyformer generate`. `neighbours`
searches the nearest neighbours of every token of TEXT to train a model with them (SPALM: the recipe `spalm`);
a token of the store's own text is not its own neighbour.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import Device, argument, device, option, refuse, set_options
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.retrieval import MixtureConfig, Store
    from polyformer.applications.retrieval.mixture import Targets
    from polyformer.applications.retrieval.neighbours import Text
    from polyformer.applications.retrieval.store import BuildProgress
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks.base import Task, Workers

EXAMPLES = """examples:
  polyformer datastore build runs/wikitext2 train.txt.gz --out stores/wikitext2
  polyformer datastore index stores/wikitext2
  polyformer evaluate runs/wikitext2 --datastore stores/wikitext2 --tune valid.txt.gz
  polyformer generate runs/wikitext2 --datastore stores/wikitext2 --prompt "The river"
  polyformer datastore build LLAMA-DIR "texts/*.txt" --out stores/big --part 1 --parts 8
  polyformer datastore merge stores/big
  polyformer datastore verify stores/big
  polyformer datastore build LLAMA-DIR "texts/*.txt" --out http://milvus.example.org:19530/texts
  polyformer datastore neighbours runs/wikitext2 train.txt.gz --datastore stores/wikitext2 --out near/train
"""


@dataclass(frozen=True, kw_only=True)
class DatastoreOptions:
    """Options of `polyformer datastore`."""

    what: Literal["build", "merge", "index", "verify", "neighbours"] = argument("action", metavar="WHAT")
    name: str = argument(
        "for build: folder of a run of the task lm, or of a checkpoint with its tokenizer; for neighbours: "
        "folder of the run that built the store; otherwise: a store",
        metavar="MODEL|STORE",
    )
    text: str | None = argument(
        "for build and neighbours: a file, a pattern such as 'texts/*.txt', ...", None, "TEXT"
    )
    out: str | None = option(
        "for build: a folder, or a Milvus collection: http://HOST:PORT/NAME on a server (with the password "
        "in the environment variable MILVUS_TOKEN), or FILE.db/NAME embedded; for neighbours: a folder",
        metavar="STORE",
        output="folder",
    )
    format: str | None = option("format of TEXT, if its name does not show it: text, lines, articles, ...")
    length: int | None = option(
        "for build: tokens per window (default: 512, or the limit of the model if smaller)"
    )
    context: int | None = option(
        "for build: tokens per window that overlap the previous window, only as context (default: 0)"
    )
    part: int | None = option("for build: part that this process builds, from 1")
    parts: int | None = option("for build: number of parts")
    lists: int | None = option("for index: number of lists of keys (default: 4 sqrt(entries))")
    bytes: int | None = option("for index: largest size of the code of a key (default: 64)")
    recall: float | None = option(
        "for index: search enough lists to find this share of the true neighbours (default: 0.95)"
    )
    datastore: str | None = option("for neighbours: store to search", metavar="STORE")
    neighbours: PositiveInt | None = option("for neighbours: number of neighbours per token (default: 4)")
    search: Literal["auto", "flat", "index"] | None = option(
        "for neighbours: search with the store's index, or exhaustively (flat) (default: auto)"
    )
    device: Device = device()


OPTIONS = {
    "build": ("text", "out", "format", "length", "context", "part", "parts"),
    "merge": (),
    "index": ("lists", "bytes", "recall"),
    "verify": (),
    "neighbours": ("text", "out", "format", "datastore", "neighbours", "search"),
}


def run(options: DatastoreOptions) -> None:
    """Run the chosen action."""
    others = {name for names in OPTIONS.values() for name in names} - {*OPTIONS[options.what]}
    refuse(options, others, f"not an option of `datastore {options.what}`")
    actions = {
        "build": build_store,
        "merge": merge_parts,
        "index": index_store,
        "verify": verify_store,
        "neighbours": find_neighbours,
    }
    actions[options.what](options)


def build_store(options: DatastoreOptions) -> None:
    """Build the store, or resume an interrupted build."""
    from polyformer.applications.retrieval.milvus import Address, build_in_milvus
    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.applications.retrieval.store import build, manifest_of, part_folder
    from polyformer.core.ops.cpu import model_threads

    required(options, "text", "out")
    part, parts = parts_of(options)
    texts, files = source(options)
    reader = open_reader(options.name, options.device)
    reading = reader.reading(options.length, options.context or 0)
    manifest = manifest_of(reader, reading, files, part, parts)
    out = str(options.out)
    address, folder = Address.of(out), part_folder(Path(out), part, parts)
    with model_threads(reader.model):
        if address is None:
            count = build(reader, texts, manifest, folder, report).count
        else:
            count = build_in_milvus(reader, texts, manifest, address, report)
    print(f"{folder if address is None else address}: {count:,} entries")


def required(options: DatastoreOptions, *names: str) -> None:
    """Raise `InputError` for the first of these options that is missing."""
    for name in names:
        if getattr(options, name) is None:
            missing = "TEXT" if name == "text" else f"--{name}"
            raise InputError(f"{missing} is missing; see polyformer datastore --help")


def source(options: DatastoreOptions) -> "tuple[Iterator[str], Text]":
    """Return the documents of TEXT, and its files."""
    from polyformer.data import DataConfig, read
    from polyformer.data.sources.checks import fingerprint

    data = DataConfig.from_dict({"path": options.text, "format": options.format, "streaming": True}, "data")
    texts = (str(dict(row)["text"]) for row in read(data, ("text",), data.path))
    return texts, tuple(fingerprint(data, ("text",)).get("path", ()))


def parts_of(options: DatastoreOptions) -> tuple[int, int]:
    """Return --part and --parts; raise `InputError` for invalid values."""
    if options.part is None and options.parts is None:
        return 1, 1
    if options.part is None or options.parts is None or not 1 <= options.part <= options.parts:
        raise InputError(
            f"--part, --parts: expected both, with 1 <= part <= parts, got {options.part} of {options.parts}"
        )
    return options.part, options.parts


def merge_parts(options: DatastoreOptions) -> None:
    """Join the parts of a store."""
    from polyformer.applications.retrieval.milvus import Address
    from polyformer.applications.retrieval.store import merge

    if Address.of(options.name) is not None:
        raise InputError(f"{options.name}: parts on a server already form one store; nothing to merge")
    merged = merge(Path(options.name), report)
    print(f"{options.name}: {merged.count:,} entries")


def index_store(options: DatastoreOptions) -> None:
    """Build an index and print its recall."""
    from polyformer.applications.retrieval.milvus import Address, index_in_milvus, open_in_milvus
    from polyformer.applications.retrieval.search import IndexConfig, make_index
    from polyformer.applications.retrieval.store import open_folder

    address, folder = Address.of(options.name), Path(options.name)
    config = IndexConfig(**set_options(options, OPTIONS["index"]))
    if address is not None:
        if options.bytes is not None:
            raise InputError("--bytes: only for the index of a folder; a server compares whole keys")
        remote = open_in_milvus(address)
        lists, probes = index_in_milvus(remote, config.lists, config.recall, config.neighbours)
        print(f"{address}: {lists:,} lists, of which a search reads {probes}")
        return
    store = open_folder(folder, "flat")
    about = make_index(folder, store.manifest, store.keys, config)
    print(
        f"{folder}: {about.lists:,} lists, {about.bytes} bytes per key; searching {about.probes} lists finds "
        f"{100 * about.recall:.1f} % of the {config.neighbours:,} nearest keys"
    )


def find_neighbours(options: DatastoreOptions) -> None:
    """Search the neighbours of every token of the text, or resume an interrupted search."""
    from polyformer.applications.retrieval import open_store
    from polyformer.applications.retrieval.neighbours import find
    from polyformer.applications.retrieval.readers import open_reader
    from polyformer.core.ops.cpu import model_threads

    required(options, "text", "datastore", "out")
    texts, files = source(options)
    reader = open_reader(options.name, options.device)
    store = open_store(str(options.datastore), reader.fingerprints, options.search or "auto")
    neighbours = 4 if options.neighbours is None else options.neighbours
    with model_threads(reader.model):
        about = find(reader, texts, files, store, neighbours, Path(str(options.out)), report)
    print(f"{options.out}: {about.neighbours} neighbours of each of {about.tokens:,} tokens")


def verify_store(options: DatastoreOptions) -> None:
    """Compare a store or a part with its checksums."""
    from polyformer.applications.retrieval.milvus import Address
    from polyformer.applications.retrieval.store import verify

    if Address.of(options.name) is not None:
        raise InputError(f"{options.name}: the server verifies its own checksums; nothing to verify here")
    manifest = verify(Path(options.name))
    result = "checksums match" if manifest.block else "complete, but the store has no checksums"
    print(f"{options.name}: {manifest.count:,} entries, {result}")


def report(progress: "BuildProgress") -> None:
    """Print the progress on standard error."""
    speed = progress.entries / progress.seconds if progress.seconds else 0.0
    line = f"{progress.total:,} entries, {speed:,.0f} entries/s"
    if progress.model_seconds:
        line += f", {100 * progress.model_seconds / progress.seconds:.0f} % of the time in the model"
    print(line, file=sys.stderr)


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
    from polyformer.training.tasks.text import perplexity_metrics

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
    from polyformer.training.tasks.text import perplexity_metrics

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
