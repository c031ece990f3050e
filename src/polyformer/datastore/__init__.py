"""Nearest neighbours among all contexts of a text: kNN-LM (Khandelwal et al. 2020), for any causal model.

    build     a text, read by the model: for each token (what the last feed-forward reads, next token)
    merge     parts that several processes have built
    index     for searches that look at a part of the keys
    search    the nearest keys of a query; `Mixture` mixes their next tokens into the model's distribution,
              and `Retrieval` gives them to a head that reads them

`definition` has the equations; everything else is about stores that do not fit into memory, and processes
that die.
"""

from polyformer.datastore.mixture import Mixture
from polyformer.datastore.retrieval import Retrieval
from polyformer.datastore.store import MixtureConfig, Store
from polyformer.datastore.stores import open_store

__all__ = ["Mixture", "MixtureConfig", "Retrieval", "Store", "open_store"]
