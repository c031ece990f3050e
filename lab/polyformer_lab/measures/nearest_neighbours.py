"""Nearest neighbours: kNN-LM, also in two domains, and SPALM, also with distances.

kNN-LM mixes a checkpoint's predictions with the continuations of the nearest stored contexts; a run chooses
the mixing weight with a store of each domain. SPALM is a decoder trained with the neighbours of its tokens.

A recipe that imports this module has SPALM's head with the distances of the neighbours in its scores:

    m_t = sum_i softmax_i(w_i . h_t - s d_i) w_i        s = exp(a), a trained

d_i is the squared distance of neighbour i, divided by the mean of the training text's neighbours. A model
takes no argument for distances, so `add_distances` appends them to the tokens of the neighbours, as integers:
`neighbour_ids` [B, T, 2 k] has k tokens, then round(50 d), at most V - 1.
"""

import dataclasses
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.mixture import STEPS, Targets, batched, measured, spread, target_shares
from polyformer.applications.retrieval.neighbours import Text, find, without
from polyformer.applications.retrieval.readers import ContextReader, Reading, open_reader, windows
from polyformer.applications.retrieval.search import IndexConfig, make_index, squared_distances
from polyformer.applications.retrieval.store import FolderStore, build, keys_of, manifest_of, open_folder
from polyformer.core.errors import InputError
from polyformer.core.files import write_json
from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import PositiveFloat
from polyformer.data import DataConfig
from polyformer.data.rows.neighbours import ABOUT, ROWS, NeighbourInfo
from polyformer.data.sources.checks import fingerprint
from polyformer.nn.heads import HeadInput, HeadShape, SemiparametricConfig
from polyformer.nn.heads.vocabulary import SemiparametricHead
from polyformer.training.recipes.fit import Fitted
from polyformer.training.recipes.recipe import with_data
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.text import exp
from polyformer_lab.cells import Cell, Row, measurement, preparation
from polyformer_lab.measures.texts import articles, book, pieces, texts_of, write_rows


@preparation
def datastore(folder: Path, model: str, text: str, characters: int, length: int) -> None:
    """Build the store of the beginning of the training text, and its index if it has enough entries.

    Args:
        folder: the folder for `store`; a build that was stopped is resumed.
        model: the folder of a run or checkpoint.
        text: the directory of WikiText-2.
        characters: the number of characters that are read, to the end of a line.
        length: tokens per forward pass.
    """
    reader, data, store = open_reader(model), _data(text, "train"), folder / "store"
    files = ({**fingerprint(data, ("text",))["path"][0], "characters": characters},)
    manifest = build_store(
        reader, beginning(texts_of(data), characters), files, reader.reading(length, 0), store
    )
    if (opened := open_folder(store)).index is None:
        try:
            make_index(store, manifest, opened.keys, IndexConfig())
        except InputError as error:
            print(error)


@measurement("neighbours")
def nearest_neighbours(
    cell: Cell, model: str, text: str, store: str, share: float, tokens: int, neighbours: Sequence[int]
) -> Iterator[Row]:
    """Yield the perplexity of the validation text by numbers of neighbours, with the best lambda and T.

    With the whole store the first row has the perplexities of the test text: of the model without the store
    (`none`), and with the best settings for a comparison with all keys (`flat`) and for an index.

    Args:
        cell: a cell without a recipe.
        model: the folder of the checkpoint that the store was built with.
        text: the directory of WikiText-2.
        store: the folder of the store.
        share: the part of the store that is searched, from its beginning.
        tokens: the number of tokens of each text that are read.
        neighbours: the numbers of neighbours.
    """
    reader, whole = open_reader(model), open_folder(Path(store))
    entries = max(1, int(share * len(whole.keys)))
    part = FolderStore(whole.folder, whole.manifest, whole.keys[:entries], whole.values[:entries])
    valid = measured(reader, part, texts_of(_data(text, "valid")), tuple(neighbours), tokens=tokens)
    best = [valid.best(index) for index in range(len(neighbours))]
    if share == 1:
        mixture, _ = min(best, key=lambda each: each[1])
        row: Row = {"validation.none": perplexity(valid.log_p)}
        for name, searched in {"flat": part, **({"index": whole} if whole.index else {})}.items():
            texts, counts = texts_of(_data(text, "test")), (mixture.neighbours,)
            test = measured(reader, searched, texts, counts, [mixture.temperature], tokens)
            row["test.none"] = perplexity(test.log_p)
            row[f"test.{name}"] = exp(float(test.losses(mixture.weight)))
            row[f"milliseconds.{name}"] = 1e3 * test.seconds[1] / len(test.log_p)
        yield row
    for mixture, loss in best:
        yield {
            "neighbours": mixture.neighbours,
            "entries": entries,
            "lambda": mixture.weight,
            "temperature": mixture.temperature,
            "perplexity": exp(loss),
        }


def build_store(
    reader: ContextReader, texts: Iterable[str], files: Text, reading: Reading, folder: Path
) -> Manifest:
    """Build the store of the contexts that a model reads in texts, or resume building it."""
    return build(reader, texts, manifest_of(reader, reading, files), folder)


def beginning(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield the first `characters` characters of a text, to the end of a line."""
    for text in texts:
        if len(text) >= characters:
            yield text[: text.find("\n", characters) + 1]
            return
        characters -= len(text)
        yield text


def perplexity(log_p: Tensor) -> float:
    """Return exp of the mean loss."""
    return exp(-float(log_p.double().mean()))


def _data(folder: str, split: str) -> DataConfig:
    return DataConfig.from_dict(with_data({"path": f"{split}.txt.gz", "streaming": True}, folder))


@preparation
def two_domains(folder: Path, text: str, other: str, characters: int, held_out: int) -> None:
    """Write the beginnings of WikiText-2 by `articles`, and of a book in the folder `other`.

    Args:
        folder: the output folder.
        text: the directory of WikiText-2.
        other: the file of the book.
        characters: the number of characters of each training text.
        held_out: the number of characters of each other text.
    """
    articles(folder, text, characters, held_out)
    (folder / "other").mkdir(exist_ok=True)
    for split, part, most in zip(("train", "validation"), book(other), (characters, held_out)):
        write_rows(folder / "other", split, beginning(pieces(part), most))


@measurement("domain")
def domain_weights(cell: Cell, texts: str, length: int, neighbours: int, tokens: int) -> Iterator[Row]:
    """Yield for each domain the lowest validation perplexity, and its lambda (`weight`) and temperature.

    The store of each domain has its training text. `none` is the perplexity without the store.

    Args:
        cell: a run without a memory, trained in the domain `own`.
        texts: the folder of `two_domains`.
        length: tokens per forward pass.
        neighbours: the number of neighbours.
        tokens: the number of validation tokens.
    """
    reader = open_reader(cell.fitted.run.folder, "cpu")
    for domain, folder in (("own", Path(texts)), ("other", Path(texts, "other"))):
        train, validation = (str(folder / f"{split}.jsonl") for split in ("train", "validation"))
        store = cell.folder / f"store-{domain}"
        manifest = build_store(reader, rows_of(train), files_of(train), reader.reading(length, 0), store)
        valid = measured(reader, open_folder(store), rows_of(validation), (neighbours,), tokens=tokens)
        best, loss = valid.best()
        yield {
            "domain": domain,
            "entries": manifest.count,
            "weight": best.weight,
            "temperature": best.temperature,
            "none": perplexity(valid.log_p),
            "perplexity": exp(loss),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class RecordingStore(FolderStore):
    """A store that records its queries and the entries nearest to them."""

    answers: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)

    def entries(self, queries: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """Return distances and rows, see `FolderStore.entries`."""
        distances, rows = super().entries(queries, neighbours)
        self.answers.append((queries, rows))
        return distances, rows


@measurement()
def neighbours_of_texts(
    cell: Cell,
    texts: str,
    length: int,
    neighbours: int,
    splits: Sequence[str] = ("train", "validation", "test"),
    distances: bool = False,
) -> Row:
    """Write a `store` of the contexts that the run reads in the training text, and `near-SPLIT`, neighbours
    of all tokens.

    Args:
        cell: a run without a memory.
        texts: the folder of train.jsonl, validation.jsonl and test.jsonl.
        length: the fewest tokens that precede each token; the run reads twice this number in a forward pass.
        neighbours: the number of neighbours per token.
        splits: the texts, the training text first.
        distances: whether distances are added, for the head of `polyformer_lab.measures.nearest_neighbours`.
    """
    reader, store, mean = open_reader(cell.fitted.run.folder, "cpu"), cell.folder / "store", None
    train = f"{texts}/train.jsonl"
    manifest = build_store(reader, rows_of(train), files_of(train), reader.reading(2 * length, length), store)
    for split in splits:
        file, near = f"{texts}/{split}.jsonl", cell.folder / f"near-{split}"
        opened = RecordingStore(**vars(open_folder(store)))
        if distances:
            shutil.rmtree(near, ignore_errors=True)  # a resumed search answers only the last queries
        about = find(reader, rows_of(file), files_of(file), opened, neighbours, near)
        if distances:
            # The import registers a head, for these studies only.

            mean = add_distances(near, about, opened, cell.fitted.model.config.vocab_size, mean)
    return {"entries": manifest.count}


@measurement("neighbours")
def mixtures(cell: Cell, texts: str, frozen: str | None = None, mixed: Sequence[int] = ()) -> Iterator[Row]:
    """Yield the perplexity of the test text, without neighbours and with each number of neighbours.

    Args:
        cell: a run that reads texts in order.
        texts: the folder of validation.jsonl, by which lambda and T are chosen, and test.jsonl.
        frozen: the folder of the run with the store.
        mixed: the numbers of neighbours.
    """
    log_p = {split: own_log_p(cell.fitted, f"{texts}/{split}.jsonl") for split in ("validation", "test")}
    yield {"perplexity": perplexity(log_p["test"])}
    if frozen is None:
        return
    valid = targets(Path(frozen), log_p["validation"], f"{texts}/validation.jsonl", mixed, None)
    test = targets(Path(frozen), log_p["test"], f"{texts}/test.jsonl", mixed, valid.temperatures)
    for index, count in enumerate(mixed):
        best, _ = valid.best(index)
        losses = test.losses(best.weight)[index]
        yield {
            "neighbours": count,
            "lambda": best.weight,
            "temperature": best.temperature,
            "perplexity": exp(float(losses[valid.temperatures.index(best.temperature)])),
        }


@torch.no_grad()
def own_log_p(fitted: Fitted, file: str) -> Tensor:
    """Return log p [n] of every token but the first of each document, read in order as one row."""
    task, model = fitted.task, fitted.model.eval()
    assert isinstance(task, LanguageModelling)
    state, parts, device = None, [], next(model.parameters()).device
    held_out = task.rows.held_out([{"text": text} for text in rows_of(file)], side_by_side=1)
    for _, batch in held_out.batches.epoch(0):
        goals = batch.pop("shift_labels")[0]
        output = model(**{name: x.to(device) for name, x in batch.items()}, state=state, use_cache=True)
        state, counted = output.state, goals != IGNORED
        log_p = output.logits[0].float().cpu().log_softmax(-1)[counted]
        parts.append(log_p.gather(1, goals[counted, None]).squeeze(1))
    return torch.cat(parts)


def targets(
    frozen: Path, log_p: Tensor, file: str, counts: Sequence[int], temperatures: tuple[float, ...] | None
) -> Targets:
    """Return p_kNN next to `log_p` of the same tokens; the first batch sets the temperatures by default."""
    reader, store = open_reader(frozen, "cpu"), open_folder(frozen / "store")
    parts, reading = [], store.manifest.reading
    for batch in batched(windows(reader.documents(rows_of(file)), reading), reading.length, None):
        near = store.search(torch.from_numpy(keys_of(reader, batch)).float(), max(counts))
        temperatures = temperatures or tuple(step * spread(near.distances) for step in STEPS)
        ids = np.concatenate([window.ids[window.carried + 1 :] for window in batch]).astype(np.int64)
        inside = [(window.documents[1:] == window.documents[:-1])[window.carried :] for window in batch]
        counted = torch.from_numpy(np.concatenate(inside))
        parts.append(target_shares(near, torch.from_numpy(ids), counts, temperatures)[counted])
    return Targets(log_p, torch.cat(parts), tuple(counts), temperatures or (), (0.0, 0.0))


def rows_of(file: str) -> Iterator[str]:
    """Yield the texts of a file written by a preparation."""
    return texts_of(DataConfig(path=file))


def files_of(file: str) -> Text:
    """Return the file in the form in which a store describes its text."""
    return tuple(fingerprint(DataConfig(path=file), ("text",))["path"])


DISTANCE_STEPS = 50
"""Integers per mean distance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceHeadConfig(SemiparametricConfig):
    """SPALM's head for neighbours with distances.

    `scale` is s before training, None to ignore the distances. `factor` multiplies m_t: sqrt(E) gives token
    vectors the length that they have at the input of a decoder.
    """

    scale: PositiveFloat | None = None
    factor: PositiveFloat = 1.0

    kind: ClassVar[str] = "semiparametric_distances"

    def build(self, shape: HeadShape) -> "DistanceHead":
        """Return the head."""
        return DistanceHead(shape, self)


class DistanceHead(SemiparametricHead):
    """A head that divides tokens and distances, and subtracts the distances from the scores."""

    def __init__(self, shape: HeadShape, config: DistanceHeadConfig):
        super().__init__(shape, config)
        self.factor = config.factor
        self.log_scale = (
            None if config.scale is None else nn.Parameter(torch.tensor([math.log(config.scale)]))
        )

    def states(self, inputs: HeadInput, bias: Tensor | None = None) -> Tensor:
        """Return z [B, T, E] for `neighbour_ids` of 2 k integers per token."""
        if inputs.neighbour_ids is None:
            return super().states(inputs, bias)
        tokens, steps = inputs.neighbour_ids.chunk(2, -1)
        if self.log_scale is not None:
            bias = -self.log_scale.exp() * steps / DISTANCE_STEPS
        return super().states(dataclasses.replace(inputs, neighbour_ids=tokens), bias, self.factor)


def add_distances(
    near: Path, about: NeighbourInfo, store: RecordingStore, vocab_size: int, mean: float | None
) -> float:
    """Append distances to the neighbours in `near`, for which `store` has answered all queries.

    mean: the distance by which all are divided; None for the mean of these distances. Returns it.
    """
    queries, rows = (torch.cat(parts) for parts in zip(*store.answers))
    if about.own:
        rows = without(rows, torch.arange(len(rows)))
    distances = squared_distances(queries, store.keys, rows)
    mean = mean or float(distances.mean())
    tokens = np.fromfile(near / ROWS, np.int32).reshape(-1, about.neighbours)
    steps = np.full_like(tokens, -1)
    steps[: len(rows)] = (distances / mean * DISTANCE_STEPS).round().clamp(max=vocab_size - 1).numpy()
    (near / ROWS).write_bytes(np.hstack([tokens, steps]).tobytes())
    write_json(near / ABOUT, dataclasses.replace(about, neighbours=2 * about.neighbours).to_dict())
    return mean
