"""Feed-forward layers."""

from polyformer.feedforward.base import FeedForwardConfig
from polyformer.feedforward.dense import Dense, DenseConfig
from polyformer.feedforward.gated import Gated, GatedConfig

__all__ = ["Dense", "DenseConfig", "FeedForwardConfig", "Gated", "GatedConfig"]
