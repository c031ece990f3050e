"""Stacks of layers and the embedding below them."""

from polyformer.stack.adaptive_embedding import AdaptiveConfig, AdaptiveEmbedding
from polyformer.stack.convolution import ConvolutionConfig
from polyformer.stack.embedding import Embedding, EmbeddingConfig
from polyformer.stack.global_projections import copy_local_projections
from polyformer.stack.layer import Layer, LayerState, Source
from polyformer.stack.multihead import AttentionConfig, MultiHeadAttention
from polyformer.stack.stack import Stack, StackConfig

__all__ = [
    "AdaptiveConfig",
    "AdaptiveEmbedding",
    "AttentionConfig",
    "ConvolutionConfig",
    "Embedding",
    "EmbeddingConfig",
    "Layer",
    "LayerState",
    "MultiHeadAttention",
    "Source",
    "Stack",
    "StackConfig",
    "copy_local_projections",
]
