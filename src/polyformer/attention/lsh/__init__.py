"""LSH attention: a token looks among the tokens that a random hash puts into its bucket."""

from polyformer.attention.lsh.lsh import LSHConfig

__all__ = ["LSHConfig"]
