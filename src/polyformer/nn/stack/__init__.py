"""Stacks of layers and the embedding below them."""

from polyformer.nn.stack.adaptive_embedding import AdaptiveConfig, AdaptiveEmbedding
from polyformer.nn.stack.attention_options import BesideConfig, IndexerConfig, LatentConfig
from polyformer.nn.stack.compressed import with_policy
from polyformer.nn.stack.config import AttentionConfig, StackConfig
from polyformer.nn.stack.convolution import ConvolutionConfig
from polyformer.nn.stack.embedding import Embedding, EmbeddingConfig, TokenDropoutConfig
from polyformer.nn.stack.feature_attention import FeatureAttention
from polyformer.nn.stack.feature_layer import FeatureLayer
from polyformer.nn.stack.feature_stack import FeatureStack, build_stack
from polyformer.nn.stack.global_projections import copy_local_projections
from polyformer.nn.stack.indexed import IndexedAttention, IndexedLatentAttention
from polyformer.nn.stack.latent import LatentAttention
from polyformer.nn.stack.layer import Layer, LayerCall, LayerState, Source
from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.nn.stack.stack import Stack

__all__ = [
    "AdaptiveConfig",
    "AdaptiveEmbedding",
    "AttentionConfig",
    "BesideConfig",
    "ConvolutionConfig",
    "Embedding",
    "EmbeddingConfig",
    "FeatureAttention",
    "FeatureLayer",
    "FeatureStack",
    "IndexedAttention",
    "IndexedLatentAttention",
    "IndexerConfig",
    "LatentAttention",
    "LatentConfig",
    "Layer",
    "LayerCall",
    "LayerState",
    "MultiHeadAttention",
    "Source",
    "Stack",
    "StackConfig",
    "TokenDropoutConfig",
    "build_stack",
    "copy_local_projections",
    "with_policy",
]
