"""Feed-forward layers."""

from polyformer.core.registry import import_modules
from polyformer.feedforward.alternate import AlternateFeedForwardConfig
from polyformer.feedforward.base import FeedForward, FeedForwardConfig
from polyformer.feedforward.chunked import Chunked, ChunkedConfig
from polyformer.feedforward.dense import Dense, DenseConfig
from polyformer.feedforward.experts import Experts, ExpertsConfig
from polyformer.feedforward.gated import Gated, GatedConfig
from polyformer.feedforward.separable import SeparableConvolutionConfig

__all__ = [
    "AlternateFeedForwardConfig",
    "Chunked",
    "ChunkedConfig",
    "Dense",
    "DenseConfig",
    "Experts",
    "ExpertsConfig",
    "FeedForward",
    "FeedForwardConfig",
    "Gated",
    "GatedConfig",
    "SeparableConvolutionConfig",
]

import_modules(__name__)
