"""LSH attention: a token attends to tokens that a random hash assigns to the same bucket.

Read `lsh` (the equation over all pairs, configuration, module and hash) first. The fast form: `sorted_window`
(windows of keys in the order of buckets, and their blocks), and `sorted_attention` with its forward and
backward passes.
"""

from polyformer.attention.mechanisms.lsh.lsh import LSHConfig

__all__ = ["LSHConfig"]
