"""The claim that a model trained with its neighbours (SPALM) has a lower perplexity than Transformer-XL, and
than Transformer-XL mixed with neighbours by a fixed share (Yogatama et al. 2021, section 4, tables 2 and 3).

A plain decoder is trained and frozen; a store is made of what it reads in the training text. Then two
decoders of one size with a memory of segments are trained for as many steps on the same text in order: one
alone, one with the head `semiparametric` and the neighbours of every token, none its own entry. The mixture
(kNN-LM) takes the first one's probabilities and neighbours of the same store; for each number of these,
lambda and T are chosen on the validation text. All read a text in order, as one row.

Deviations: a part of WikiText-2, models some thousand times smaller, one seed.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.bench.claims import TINY, decoder_options, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.core.labels import IGNORED
from polyformer.data import DataConfig, read
from polyformer.data.fingerprint import fingerprint
from polyformer.datastore.build import Progress, build, keys_of
from polyformer.datastore.manifest import Manifest
from polyformer.datastore.neighbours import Text, find
from polyformer.datastore.readers import ContextReader, open_reader
from polyformer.datastore.scoring import STEPS, Targets, batched, spread, target_shares
from polyformer.datastore.store import FolderStore, open_folder
from polyformer.datastore.windows import windows
from polyformer.recipes import Recipe
from polyformer.recipes.find import with_data
from polyformer.recipes.fit import Fitted
from polyformer.tasks import LanguageModelling
from polyformer.tasks.metrics import exp
from polyformer.training.config import at_least

SPLITS = {"train": "train.txt.gz", "validation": "valid.txt.gz", "test": "test.txt.gz"}


EXPERIMENT = Experiment(
    sources={"data": "wikitext2"},
    quick={
        **TINY,
        "characters": 4000,
        "held_out": 1000,
        "length": 16,
        "neighbours": 2,
        "mixed": (2,),
    },
    claims=(
        Claim(
            name="spalm",
            says="training with neighbours lowers perplexity beside Transformer-XL, and beside "
            "mixing them in",
            paper="Yogatama et al. 2021 (SPALM)",
            section="section 4, tables 2 and 3",
            published="WikiText-103, WMT and enwik8: below Transformer-XL and below it mixed with neighbours",
            measured="test perplexity of Transformer-XL, alone, mixed with neighbours and trained with them",
            scale="WikiText-2, 3 layers of 96, 500 steps, 158,010 entries",
            rule="SPALM's perplexity is below both",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpalmClaim(Config):
    """Sizes of the runs and of the text; a second call goes on with what OUT holds."""

    data: str  # a folder with WikiText-2's train.txt.gz, valid.txt.gz and test.txt.gz
    characters: int = 500_000  # of the training text, in whole articles
    held_out: int = 100_000  # characters of the validation text, and of the test text
    steps: int = 400  # of each of the three runs
    length: int = 64  # tokens in a segment, and in the memory; the frozen model reads twice as many
    batch_tokens: int = 1024
    layers: int = 3
    width: int = 96
    heads: int = 4
    vocabulary: int = 2000
    lr: float = 3e-3
    neighbours: int = 4  # of SPALM
    mixed: tuple[int, ...] = (4, 16, 64)  # of the mixture
    seed: int = 0
    out: str = "runs/spalm"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads)
        at_least(1, characters=self.characters, held_out=self.held_out, neighbours=self.neighbours)
        at_least(2, length=self.length)
        at_least(2 * self.length, batch_tokens=self.batch_tokens)
        if not self.mixed or min(self.mixed) < 1:
            raise InputError(f"mixed: expected numbers of neighbours of 1 or more, got {list(self.mixed)}")


def run(config: SpalmClaim) -> dict[str, float]:
    """Train, search and measure; write OUT/spalm.csv and .png, print a table and the verdict."""
    folder = Path(config.out).absolute()
    data = part_of_text(config, folder / "text")
    taken_up(Recipe.from_dict(recipe(config, data, memory=False)), folder / "frozen")
    reader = open_reader(folder / "frozen", "cpu")
    store = stored(config, reader, data["train"], folder / "store")
    near = []
    for split, file in data.items():
        near.append(str(folder / f"near-{split}"))
        find(reader, texts_of(file), files_of(file), store, config.neighbours, Path(near[-1]), say)
    alone = taken_up(Recipe.from_dict(recipe(config, data)), folder / "transformer-xl")
    spalm = taken_up(Recipe.from_dict(recipe(config, data, near=near)), folder / "spalm")
    log_p = {split: own_log_p(alone, data[split]) for split in ("validation", "test")}
    results = {
        "Transformer-XL": exp(-float(log_p["test"].double().mean())),
        "SPALM": exp(-float(own_log_p(spalm, data["test"]).double().mean())),
        **mixtures(config, reader, store, log_p, data),
    }
    write_csv(folder / "spalm.csv", ("model", "test_perplexity"), results.items())
    for name, value in results.items():
        print(f"{name:<28}{value:>10.2f}")
    curves = {name: [(k, results[name]) for k in config.mixed] for name in ("Transformer-XL", "SPALM")}
    curves["Transformer-XL, mixed"] = [(k, results[mixed_name(k)]) for k in config.mixed]
    line_plot(folder / "spalm.png", curves, "neighbours of the mixture", "test perplexity", log=True)
    conclude(EXPERIMENT, config, [verdict(config, results)])
    return results


def part_of_text(config: SpalmClaim, folder: Path) -> dict[str, str]:
    """The first articles of each text, in files of their own, by split."""
    files = {}
    for split, name in SPLITS.items():
        data = DataConfig.from_dict(
            with_data({"path": name, "format": "articles", "streaming": True}, config.data)
        )
        left, articles = config.characters if split == "train" else config.held_out, []
        for row in read(data, ("text",), data.path):
            if left <= 0:
                break
            articles.append(str(dict(row)["text"]))
            left -= len(articles[-1])
        files[split] = str(folder / f"{split}.txt")
        atomic_write(files[split], "".join(articles).encode())
    return files


def texts_of(file: str) -> Iterator[str]:
    """The articles in a file."""
    return (str(dict(row)["text"]) for row in read(data_of(file), ("text",), file))


def files_of(file: str) -> Text:
    """A file as a store describes it."""
    return tuple(fingerprint(data_of(file), ("text",))["path"])


def data_of(file: str) -> DataConfig:
    """How a file is read."""
    return DataConfig(path=file, format="articles")


def recipe(
    config: SpalmClaim, data: dict[str, str], memory: bool = True, near: list[str] | None = None
) -> dict[str, Any]:
    """The run without a memory, whose rows are twice as long; with one; or with one and neighbours."""
    length = config.length if memory else 2 * config.length
    return {
        "task": {
            "kind": "lm",
            "feed": "in_order" if memory else "packed",
            "row_length": length,
            "batch_tokens": config.batch_tokens,
            "neighbours": near or [],
        },
        "model": decoder_options(
            config,
            position="transformer_xl",
            dropout=0.1,
            memory=f"recurrent(length={length})" if memory else "none",
            head="semiparametric" if near else "language_model",
        ),
        "data": {"path": data["train"], "validation": data["validation"], "format": "articles"},
        "tokenizer": {"algorithm": "bpe", "vocab_size": config.vocabulary},
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "cosine", "warmup": min(50, config.steps)},
        "training": {
            "steps": config.steps,
            "reporting": {"log_every": 50, "evaluate_every": config.steps},
            "saving": {"checkpoint_every": 100},
        },
        "seed": config.seed,
    }


def stored(config: SpalmClaim, reader: ContextReader, file: str, folder: Path) -> FolderStore:
    """What the frozen model reads in the training text, each token after `length` others or more."""
    manifest = Manifest(
        dimension=reader.dimension,
        model=reader.fingerprints["model"],
        tokenizer=reader.fingerprints["tokenizer"],
        key=reader.key,
        reading=reader.reading(2 * config.length, config.length),
        text=files_of(file),
    )
    build(reader, texts_of(file), manifest, folder, say)
    return open_folder(folder)


def say(progress: Progress) -> None:
    """How far a build or a search is."""
    print(f"{progress.total:,} tokens", flush=True)


@torch.no_grad()
def own_log_p(fitted: Fitted, file: str) -> Tensor:
    """log p [n] of every token but the first of each article, read in order as one row."""
    task, model = fitted.task, fitted.model.eval()
    assert isinstance(task, LanguageModelling)
    state, parts, device = None, [], next(model.parameters()).device
    for _, batch in task.held_out([{"text": text} for text in texts_of(file)], side_by_side=1).batches.epoch(
        0
    ):
        goals = batch.pop("shift_labels")[0]
        output = model(**{name: x.to(device) for name, x in batch.items()}, state=state, use_cache=True)
        state, counted = output.state, goals != IGNORED
        log_p = output.logits[0].float().cpu().log_softmax(-1)[counted]
        parts.append(log_p.gather(1, goals[counted, None]).squeeze(1))
    return torch.cat(parts)


def mixtures(
    config: SpalmClaim,
    reader: ContextReader,
    store: FolderStore,
    log_p: dict[str, Tensor],
    data: dict[str, str],
) -> dict[str, float]:
    """Test perplexities of the mixture with `log_p` by numbers of neighbours, with the validation text's
    lambda and T."""
    valid = shares(config, reader, store, log_p["validation"], data["validation"], None)
    test = shares(config, reader, store, log_p["test"], data["test"], valid.temperatures)
    results = {}
    for index, count in enumerate(config.mixed):
        best, _ = valid.best(index)
        column = valid.temperatures.index(best.temperature)
        results[mixed_name(count)] = exp(float(test.losses(best.weight)[index, column]))
        print(f"k {count}: lambda {best.weight:g}, T {best.temperature:.3g}")
    return results


def shares(
    config: SpalmClaim,
    reader: ContextReader,
    store: FolderStore,
    log_p: Tensor,
    file: str,
    temperatures: tuple[float, ...] | None,
) -> Targets:
    """p_kNN beside `log_p` of the same tokens; the temperatures are those of the first batch by default."""
    parts, reading = [], store.manifest.reading
    for batch in batched(windows(reader.documents(texts_of(file)), reading), reading.length, None):
        near = store.search(torch.from_numpy(keys_of(reader, batch)).float(), max(config.mixed))
        temperatures = temperatures or tuple(step * spread(near.distances) for step in STEPS)
        ids = np.concatenate([window.ids[window.carried + 1 :] for window in batch]).astype(np.int64)
        inside = [(window.documents[1:] == window.documents[:-1])[window.carried :] for window in batch]
        counted = torch.from_numpy(np.concatenate(inside))
        parts.append(target_shares(near, torch.from_numpy(ids), config.mixed, temperatures)[counted])
    return Targets(log_p, torch.cat(parts), config.mixed, temperatures or (), (0.0, 0.0))


def mixed_name(count: int) -> str:
    """What the mixture with so many neighbours is called."""
    return f"Transformer-XL, mixed, k = {count}"


def verdict(config: SpalmClaim, results: dict[str, float]) -> Verdict:
    """What the figures say of the claim."""
    best = min(results[mixed_name(count)] for count in config.mixed)
    differs = []
    if results["SPALM"] >= results["Transformer-XL"]:
        differs.append("Transformer-XL alone is as good")
    if results["SPALM"] >= best:
        differs.append("the mixture is as good")
    outcome = f"differs from the paper: {'; '.join(differs)}" if differs else "reproduced"
    figures = f"alone {results['Transformer-XL']:.2f}, mixed {best:.2f}, SPALM {results['SPALM']:.2f}"
    text = f"training with neighbours lowers perplexity, more than mixing them in: {outcome} ({figures})"
    return verdict_of(not differs, text)
