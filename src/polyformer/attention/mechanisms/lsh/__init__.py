"""LSH attention: a token attends to tokens that a random hash assigns to the same bucket.

Read `definition` (the equation over all pairs), then `lsh` (configuration, module and hash). The fast
form: `sorted_window` (windows of keys in the order of buckets, and their blocks), `sorted_attention` with its
forward and backward passes, and `lookup` for a few queries after many keys.
"""

from polyformer.attention.mechanisms.lsh.lsh import LSHConfig

__all__ = ["LSHConfig"]
