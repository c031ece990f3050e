"""SPALM: a decoder trained with the neighbours of its tokens, and decoders mixed with neighbours."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.build import keys_of
from polyformer.applications.retrieval.mixture import STEPS, Targets, batched, spread, target_shares
from polyformer.applications.retrieval.neighbours import Text, find
from polyformer.applications.retrieval.readers import open_reader, windows
from polyformer.applications.retrieval.store import FolderStore, open_folder
from polyformer.core.host_values import IGNORED
from polyformer.data import DataConfig
from polyformer.data.sources.checks import fingerprint
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import LanguageModelling
from polyformer.training.tasks.metrics import exp
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.measures.nearest_neighbours import build_store, perplexity
from polyformer_lab.measures.texts import texts_of


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
        distances: whether distances are added, for the head of `polyformer_lab.neighbour_distances`.
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
            from polyformer_lab.neighbour_distances import add_distances

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
    held_out = task.held_out([{"text": text} for text in rows_of(file)], side_by_side=1)
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
