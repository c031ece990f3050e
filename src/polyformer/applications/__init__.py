"""Uses of a trained model: retrieval from a datastore, sentence vectors, early exits, prompting, probes."""
