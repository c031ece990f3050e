"""Nearest neighbours among all contexts of a text: kNN-LM (Khandelwal et al. 2020), for any causal model.

    build     reads a text with the model; the entry of a token is (last feed-forward input, next token)
    merge     joins parts that several processes have built
    index     speeds up searches, which then compare only some of the keys
    search    finds the nearest keys of a query; `Mixture` mixes their next tokens into the model's
              distribution, and `Retrieval` passes them to a head that reads them

`definition` contains the equations. The other modules handle stores larger than memory and interrupted
processes.
"""

from polyformer.applications.retrieval.mixture import Mixture
from polyformer.applications.retrieval.retrieval import Retrieval
from polyformer.applications.retrieval.store import MixtureConfig, Store
from polyformer.applications.retrieval.stores import open_store

__all__ = ["Mixture", "MixtureConfig", "Retrieval", "Store", "open_store"]
