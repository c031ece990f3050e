"""Feed-forward layers."""

from polyformer.core.registry import import_modules
from polyformer.nn.feedforward.alternate import AlternateFeedForwardConfig
from polyformer.nn.feedforward.base import FeedForward, FeedForwardConfig
from polyformer.nn.feedforward.chunked import Chunked, ChunkedConfig
from polyformer.nn.feedforward.dense import Dense, DenseConfig
from polyformer.nn.feedforward.experts import Experts, ExpertsConfig
from polyformer.nn.feedforward.gated import Gated, GatedConfig
from polyformer.nn.feedforward.no_feedforward import NoFeedForward, NoFeedForwardConfig
from polyformer.nn.feedforward.separable import SeparableConvolutionConfig

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
    "NoFeedForward",
    "NoFeedForwardConfig",
    "SeparableConvolutionConfig",
]

import_modules(__name__)
