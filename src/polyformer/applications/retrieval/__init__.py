"""Nearest neighbours among all contexts of a text: kNN-LM (Khandelwal et al. 2020), for any causal model.

    build     reads a text with the model; the entry of a token is (last feed-forward input, next token)
    merge     joins parts that several processes have built
    index     speeds up searches, which then compare only some of the keys
    search    finds the nearest keys of a query; `Mixture` mixes their next tokens into the model's
              distribution, and `Retrieval` passes them to a head that reads them

`mixture` contains the equations. The other modules handle stores larger than memory and interrupted
processes.
"""

from collections.abc import Mapping
from pathlib import Path

from polyformer.applications.retrieval.milvus import Address, open_in_milvus
from polyformer.applications.retrieval.mixture import Mixture, Retrieval
from polyformer.applications.retrieval.store import MixtureConfig, Search, Store, open_folder

__all__ = ["Mixture", "MixtureConfig", "Retrieval", "Store", "open_store"]


def open_store(name: str | Path, fingerprints: Mapping[str, str], search: Search = "auto") -> Store:
    """Open the store `name`, a folder or a Milvus address, for a model and tokenizer (`fingerprints`).

    Raises `InputError` if it does not exist, is damaged or unfinished, or was built with another model.
    """
    address = Address.of(str(name))
    store: Store = open_folder(Path(name), search) if address is None else open_in_milvus(address, search)
    store.manifest.check_reader(fingerprints["model"], fingerprints["tokenizer"], name)
    return store
