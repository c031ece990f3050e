"""polyformer: the whole Transformer family as parts that compose."""

__version__ = "0.1.0"
