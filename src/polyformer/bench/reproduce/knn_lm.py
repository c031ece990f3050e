"""The claim "nearest neighbours among a text's contexts lower a language model's perplexity" (kNN-LM,
Khandelwal et al. 2020), for any checkpoint that writes, on WikiText-2.

A store is built of the beginning of the training text (stopped, it goes on). On the first tokens of the
validation text lambda and T are chosen, for several sizes of the store and numbers of neighbours; with what
is best the test text is read, by comparing all keys and by an IVF-PQ index. Perplexities are per token.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from polyformer.bench.claims import write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.fingerprint import fingerprint
from polyformer.datastore.build import Progress, build
from polyformer.datastore.index import IndexConfig, make_index
from polyformer.datastore.manifest import Manifest
from polyformer.datastore.readers import ContextReader, open_reader
from polyformer.datastore.scoring import STEPS, Targets, batched, contexts, spread, target_shares
from polyformer.datastore.store import FolderStore, MixtureConfig, open_folder
from polyformer.datastore.windows import Reading, windows
from polyformer.recipes.find import with_data
from polyformer.tasks.metrics import exp
from polyformer.training.config import at_least

QUERIES = 2048
"""Contexts that are searched for at once."""


EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "model": "decoder"},
    quick={"characters": 20000, "length": 32, "tokens": 128, "sizes": (2, 1), "neighbours": (2, 8)},
    claims=(
        Claim(
            name="knn-lm",
            says="nearest neighbours among a text's contexts lower a language model's perplexity",
            paper="Khandelwal et al. 2020 (kNN-LM)",
            section="section 4.1, table 1",
            published="WikiText-103 test: 18.65 to 16.12 with a store of 103 million entries",
            measured="perplexity of the test text with and without neighbours, lambda and temperature "
            "chosen on validation",
            scale="SmolLM2-135M, 196,608 entries of WikiText-2's training text, 16,384 test tokens",
            rule="test perplexity with neighbours is below the model's own",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnClaim(Config):
    """The checkpoint, where WikiText-2 lies, and sizes; the paper has a store of 103 million entries."""

    model: str  # the folder of a run or checkpoint
    data: str  # a folder with train.txt.gz, valid.txt.gz and test.txt.gz
    characters: int = 850_000  # of the training text that the store is of
    length: int = 512  # tokens that are read at once
    tokens: int = 16_384  # of the validation text, and of the test text
    sizes: tuple[int, ...] = (8, 4, 2, 1)  # the store's first eighth, fourth, half, and all of it
    neighbours: tuple[int, ...] = (16, 128, 1024)
    out: str = "runs/knn-lm"

    def __post_init__(self) -> None:
        at_least(1, characters=self.characters, length=self.length, tokens=self.tokens)
        if not self.sizes or not self.neighbours or min(*self.sizes, *self.neighbours) < 1:
            raise InputError("sizes, neighbours: expected numbers of 1 or more")


@dataclasses.dataclass(frozen=True, eq=False)
class Contexts:
    """Of a text: queries [n, D], the tokens that follow [n], and their log p_LM [n]."""

    queries: Tensor
    targets: Tensor
    log_p: Tensor


def run(config: KnnClaim) -> dict[str, float]:
    """Measure, write OUT/knn_lm.csv and .png, print the table and the verdict."""
    reader, folder = open_reader(config.model), Path(config.out)
    store = stored(config, reader, folder / "store")
    valid, test = (read_contexts(config, reader, split) for split in ("validation", "test"))
    rows = [row for size in config.sizes for row in sized(config, store, valid, size)]
    print(f"{'entries':>9} {'k':>6} {'lambda':>7} {'T':>9} {'perplexity':>11}")
    print(f"{0:>9} {0:>6} {0:>7} {'':>9} {perplexity(valid.log_p):>11.3f}   the model alone")
    for entries, mixture, value in rows:
        line = f"{entries:>9} {mixture.neighbours:>6} {mixture.weight:>7.2f} {mixture.temperature:>9.3g}"
        print(f"{line} {value:>11.3f}")
    columns = "entries", "neighbours", "lambda", "temperature", "validation_perplexity"
    cells = ((n, own.neighbours, own.weight, own.temperature, value) for n, own, value in rows)
    write_csv(folder / "knn_lm.csv", columns, cells)
    curves = {
        f"k = {count}": [(entries, value) for entries, mixture, value in rows if mixture.neighbours == count]
        for count in dict.fromkeys(mixture.neighbours for _, mixture, _ in rows)
    }
    line_plot(folder / "knn_lm.png", curves, "entries of the store", "validation perplexity", log=True)
    _, best, _ = min(rows, key=lambda row: row[2])
    alone = {"validation": perplexity(valid.log_p), "test": perplexity(test.log_p)}
    measured = compared(store, best, {"validation": valid, "test": test})
    for name, numbers in measured.items():
        changes = [f"{split} {alone[split]:.2f} -> {numbers[split]:.2f}" for split in alone]
        print(f"{name}: perplexity {', '.join(changes)}; {numbers['ms']:.2f} ms a token for the search")
    conclude(EXPERIMENT, config, [verdict(alone["test"], best, measured["flat"]["test"])])
    return {"alone": alone["test"], **{name: numbers["test"] for name, numbers in measured.items()}}


def stored(config: KnnClaim, reader: ContextReader, folder: Path) -> FolderStore:
    """The store, built or gone on with, and its index where it has entries enough."""
    data = DataConfig.from_dict(with_data({"path": "train.txt.gz", "streaming": True}, config.data))
    text = fingerprint(data, ("text",))["path"]
    described = Manifest(
        dimension=reader.dimension,
        model=reader.fingerprints["model"],
        tokenizer=reader.fingerprints["tokenizer"],
        key=reader.key,
        reading=reader.reading(config.length, 0),
        text=({**text[0], "characters": config.characters},),
    )
    manifest = build(reader, beginning(data, config.characters), described, folder, say)
    store = open_folder(folder)
    if store.index is None:
        try:
            make_index(folder, manifest, store.keys, IndexConfig())
        except InputError as error:
            print(error)
    return open_folder(folder)


def beginning(data: DataConfig, characters: int) -> Iterator[str]:
    """The first so many characters of a text, to the end of a line."""
    for row in read(data, ("text",), data.path):
        text = str(dict(row)["text"])
        if len(text) >= characters:
            yield text[: text.find("\n", characters) + 1]
            return
        characters -= len(text)
        yield text


def say(progress: Progress) -> None:
    """How far the build is."""
    print(f"{progress.total:,} entries", file=sys.stderr)


def read_contexts(config: KnnClaim, reader: ContextReader, split: str) -> Contexts:
    """What the model makes of the first tokens of the text."""
    name = {"validation": "valid.txt.gz", "test": "test.txt.gz"}[split]
    data = DataConfig.from_dict(with_data({"path": name, "streaming": True}, config.data))
    documents = reader.documents(str(dict(row)["text"]) for row in read(data, ("text",), data.path))
    reading: Reading = reader.reading(config.length, 0)
    parts = [
        contexts(reader, batch)
        for batch in batched(windows(documents, reading), reading.length, config.tokens)
    ]
    return Contexts(*(torch.cat(column) for column in zip(*parts)))


def sized(
    config: KnnClaim, store: FolderStore, text: Contexts, size: int
) -> Iterator[tuple[int, MixtureConfig, float]]:
    """For each number of neighbours: entries, the best mixture and its perplexity with part of the store."""
    entries = max(1, len(store.keys) // size)
    part = FolderStore(store.folder, store.manifest, store.keys[:entries], store.values[:entries])
    targets, _ = scored(part, text, config.neighbours, None)
    for index in range(len(config.neighbours)):
        mixture, loss = targets.best(index)
        yield entries, mixture, exp(loss)


def scored(
    store: FolderStore, text: Contexts, counts: tuple[int, ...], temperatures: list[float] | None
) -> tuple[Targets, float]:
    """p_kNN of all tokens of a text, and the search's seconds."""
    shares, seconds = [], 0.0
    for start in range(0, len(text.queries), QUERIES):
        before = time.monotonic()
        near = store.search(text.queries[start : start + QUERIES], max(counts))
        seconds += time.monotonic() - before
        temperatures = temperatures or [step * spread(near.distances) for step in STEPS]
        tokens = text.targets[start : start + QUERIES]
        shares.append(target_shares(near, tokens, counts, temperatures).cpu())
    times = 0.0, seconds
    return Targets(text.log_p, torch.cat(shares), counts, tuple(temperatures or ()), times), seconds


def compared(
    store: FolderStore, mixture: MixtureConfig, texts: dict[str, Contexts]
) -> dict[str, dict[str, float]]:
    """Perplexities with the best mixture, by comparing all keys and by the index; milliseconds a token."""
    searches = {"flat": dataclasses.replace(store, index=None), "IVF-PQ": store}
    if store.index is None:
        del searches["IVF-PQ"]
    measured: dict[str, dict[str, float]] = {}
    for name, search in searches.items():
        measured[name] = {}
        for split, text in texts.items():
            targets, seconds = scored(search, text, (mixture.neighbours,), [mixture.temperature])
            measured[name][split] = exp(float(targets.losses(mixture.weight)))
            measured[name]["ms"] = 1e3 * seconds / len(text.targets)
    return measured


def perplexity(log_p: Tensor) -> float:
    """exp of the mean loss."""
    return exp(-float(log_p.double().mean()))


def verdict(alone: float, mixture: MixtureConfig, mixed: float) -> Verdict:
    """Whether neighbours help on text that nothing was chosen on, by both perplexities."""
    holds = mixed < alone
    return verdict_of(
        holds,
        "neighbours lower the perplexity of the test text: "
        f"{'reproduced' if holds else 'not reproduced'} (k {mixture.neighbours}, lambda {mixture.weight:g}, "
        f"T {mixture.temperature:.3g}; the test text had no part in choosing them)",
    )
