"""Feed-forward layers."""

from polyformer.core.registry import import_modules
from polyformer.nn.feedforward.experts import Experts, ExpertsConfig
from polyformer.nn.feedforward.feedforward import (
    AlternateFeedForwardConfig,
    Chunked,
    ChunkedConfig,
    Dense,
    DenseConfig,
    FeedForward,
    FeedForwardConfig,
    Gated,
    GatedConfig,
    NoFeedForward,
    NoFeedForwardConfig,
    SeparableConvolutionConfig,
)

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
