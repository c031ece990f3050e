"""`evaluate --frozen`: evaluate a model trained with neighbours (SPALM), after searching the neighbours."""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.training.recipes.run import Run
    from polyformer.training.tasks.base import Task


@contextmanager
def with_neighbours(options: Any, run: "Run", parts: Mapping[str, Sequence[Any]]) -> "Iterator[Task]":
    """Yield the run's task with the neighbours of `parts`, the rows of text by their files."""
    from polyformer.applications.retrieval.neighbours import find
    from polyformer.applications.retrieval.readers import open_own_reader
    from polyformer.applications.retrieval.stores import open_store
    from polyformer.data import DataConfig
    from polyformer.data.fingerprint import fingerprint
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
