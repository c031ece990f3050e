"""A search for the neighbours of all tokens of a text, for models with the head `semiparametric` (SPALM).

The text is read like the store's text, so that token i is the context of entry i. If the store was built from
this text, that entry is the token itself and is excluded: k + 1 neighbours are searched, and the own entry or
else the farthest is dropped. The search resumes after any interruption: rows count when they are synced and
progress.json counts them.
"""

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyformer.applications.retrieval.entries import PROGRESS
from polyformer.applications.retrieval.readers import ContextReader, RunReader, Window, windows
from polyformer.applications.retrieval.store import (
    BATCH_TOKENS,
    COMMIT_SECONDS,
    BuildProgress,
    FolderStore,
    Report,
    Store,
    batches,
    is_begun,
    keys_of,
)
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write, read_json, write_json, writing
from polyformer.data.rows.neighbours import ABOUT, DOCUMENTS, ROWS, NeighbourInfo, digest
from polyformer.data.sources.checks import data_changes
from polyformer.training.run_control import sole_writer

Text = tuple[dict[str, object], ...]
"""The files of a text by size and digest, as in a manifest."""


def find(
    reader: ContextReader,
    texts: Iterable[str],
    text: Text,
    store: Store,
    neighbours: int,
    folder: Path,
    report: Report = lambda progress: None,
) -> NeighbourInfo:
    """Write the `neighbours` nearest to each token of `texts` to `folder`, or resume there.

    Raises `InputError` for a model that is no run of the task lm (the documents could not be found again),
    for a store on a server (its entries have no row numbers), for a part of the store's text, and for a
    folder with other content.
    """
    if neighbours < 1:
        raise InputError(f"--neighbours: expected 1 or more, got {neighbours}")
    if not isinstance(reader, RunReader):
        raise InputError(
            f"{reader.folder}: expected a run of the task lm, whose documents are <bos> text <eos>"
        )
    if not isinstance(store, FolderStore):
        raise InputError("--datastore: expected a store in a folder, got one of a server")
    about = NeighbourInfo(
        neighbours=neighbours,
        tokenizer=reader.fingerprints["tokenizer"],
        model=reader.fingerprints["model"],
        entries=len(store.keys),
        own=is_own(store, text),
        text=text,
    )
    with sole_writer(folder, "the same command resumes it later"):
        begun = begin(folder, about)
        return begun if begun.tokens is not None else write(reader, texts, store, about, folder, report)


def is_own(store: FolderStore, text: Text) -> bool:
    """Return whether the store is of this text; raises `InputError` if it shares only some of the files."""
    own = store.manifest.text
    if len(own) == len(text) and not data_changes({"text": list(own)}, {"text": list(text)}):
        return True
    shared = {str(file["sha256"]) for file in own} & {str(file["sha256"]) for file in text}
    for file in text:
        if file["sha256"] in shared:
            raise InputError(
                f"{file['file']}: one of the files that the store is of; name all of these, in their order, "
                "so that no token finds itself"
            )
    return False


def begin(folder: Path, about: NeighbourInfo) -> NeighbourInfo:
    """Return the description in `folder`; if there is none, write `about` first."""
    if not is_begun(folder, ABOUT):
        write_json(folder / ABOUT, about.to_dict())
        return about
    begun = NeighbourInfo.read(folder)
    same = dataclasses.replace(begun, tokens=None, documents=None, text=about.text)
    changes = data_changes({"text": list(begun.text)}, {"text": list(about.text)})
    if same != about or changes or len(begun.text) != len(about.text):
        names = [field.name for field in dataclasses.fields(about)]
        differ = [name for name in names if getattr(same, name) != getattr(about, name)]
        raise InputError(
            f"{folder}: started with other input ({'; '.join(changes) or ', '.join(differ) or 'text'}); use "
            "the same input, or choose another --out"
        )
    return begun


class Documents:
    """A pass over documents that records the digest and the row of the first token of each."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.tokens = 0

    def watched(self, documents: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Yield the same documents."""
        for document in documents:
            self.places.append((digest(document), self.tokens))
            self.tokens += len(document)
            yield document


def write(
    reader: ContextReader,
    texts: Iterable[str],
    store: FolderStore,
    about: NeighbourInfo,
    folder: Path,
    report: Report,
) -> NeighbourInfo:
    """Search the neighbours of the remaining tokens."""
    reading, documents = store.manifest.reading, Documents()
    all_windows = windows(documents.watched(reader.documents(texts)), reading)
    done = read_json(folder / PROGRESS, dict) if (folder / PROGRESS).exists() else {"windows": 0, "rows": 0}
    progress, start = BuildProgress(done["rows"]), time.monotonic()
    committed = start
    with writing(folder / ROWS), open(folder / ROWS, "ab") as file:
        os.ftruncate(file.fileno(), done["rows"] * about.neighbours * 4)
        for batch in batches(all_windows, max(1, BATCH_TOKENS // reading.length), done["windows"]):
            before = time.monotonic()
            queries = torch.from_numpy(keys_of(reader, batch)).float()
            progress.model_seconds += time.monotonic() - before
            file.write(rows_of(store, queries, done["rows"] if about.own else None, batch, about).tobytes())
            done = {"windows": done["windows"] + len(batch), "rows": done["rows"] + len(queries)}
            now = time.monotonic()
            progress.entries += len(queries)
            progress.total, progress.seconds = done["rows"], now - start
            if now - committed > COMMIT_SECONDS:
                file.flush()
                os.fsync(file.fileno())
                write_json(folder / PROGRESS, done)
                report(progress)
                committed = now
        last = np.full((documents.tokens - done["rows"], about.neighbours), -1, np.int32)
        file.write(last.tobytes())  # the last token has no next token
        file.flush()
        os.fsync(file.fileno())
    report(progress)
    atomic_write(folder / DOCUMENTS, np.array(documents.places, np.int64).tobytes())
    finished = dataclasses.replace(about, tokens=documents.tokens, documents=len(documents.places))
    write_json(folder / ABOUT, finished.to_dict())
    (folder / PROGRESS).unlink(missing_ok=True)
    return finished


def rows_of(
    store: FolderStore, queries: Tensor, first: int | None, batch: Sequence[Window], about: NeighbourInfo
) -> np.ndarray:
    """Return the tokens [n, k] that followed the neighbours of queries [n, D], -1 if there are fewer entries.

    first: the entry of the first query if the store is of this text, with the same tokens; otherwise None.
    """
    more = 0 if first is None else 1
    _, entries = store.entries(queries, about.neighbours + more)
    if first is not None:
        following = np.concatenate([window.ids[window.carried + 1 :] for window in batch])
        if not np.array_equal(store.values[first : first + len(queries)], following):
            raise InputError(
                f"{store.folder}: its entries are not those of the text that it names; build it again"
            )
        entries = without(entries, torch.arange(first, first + len(queries)))
    tokens = store.values[entries.clamp_min(0).numpy()].astype(np.int32)
    tokens[entries.numpy() < 0] = -1
    return np.pad(tokens, ((0, 0), (0, about.neighbours - tokens.shape[1])), constant_values=-1)


def without(entries: Tensor, own: Tensor) -> Tensor:
    """Return entries [n, k + 1] without own [n]: [n, k]; rows that do not contain it lose the last entry."""
    is_own = entries == own.unsqueeze(1)
    is_own[:, -1] |= ~is_own.any(1)
    return entries[~is_own].view(len(entries), -1)
