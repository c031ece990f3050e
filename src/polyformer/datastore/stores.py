"""The store of a name, wherever it lies."""

from collections.abc import Mapping
from pathlib import Path

from polyformer.datastore.store import Search, Store, open_folder


def open_store(name: str | Path, fingerprints: Mapping[str, str], search: Search = "auto") -> Store:
    """The store `name`, for the model and tokenizer of these `fingerprints`.

    Raises `InputError` where there is none, or one that is damaged, unfinished or of another model.
    """
    store = open_folder(Path(name), search)
    store.manifest.check_reader(fingerprints["model"], fingerprints["tokenizer"], name)
    return store
