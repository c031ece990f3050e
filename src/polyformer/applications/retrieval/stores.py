"""Opening of stores by name, in a folder or on a server."""

from collections.abc import Mapping
from pathlib import Path

from polyformer.applications.retrieval.milvus_server import Address
from polyformer.applications.retrieval.milvus_store import open_in_milvus
from polyformer.applications.retrieval.store import Search, Store, open_folder


def open_store(name: str | Path, fingerprints: Mapping[str, str], search: Search = "auto") -> Store:
    """Open the store `name`, a folder or a Milvus address, for a model and tokenizer (`fingerprints`).

    Raises `InputError` if it does not exist, is damaged or unfinished, or was built with another model.
    """
    address = Address.of(str(name))
    store: Store = open_folder(Path(name), search) if address is None else open_in_milvus(address, search)
    store.manifest.check_reader(fingerprints["model"], fingerprints["tokenizer"], name)
    return store
