"""LSH attention: a token attends to tokens that a random hash puts into its bucket.

Read `definition` (the equation over all pairs), then `lsh` (configuration and module) and `hashing`. The fast
form: `sorted_window` (who attends to whom, once sorted by bucket), `window_blocks` (that as blocks of queries
and keys), `sorted_attention` with its forward and backward passes, and `lookup` for a few queries after many
keys.
"""

from polyformer.attention.lsh.lsh import LSHConfig

__all__ = ["LSHConfig"]
