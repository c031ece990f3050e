"""Heads: what is predicted from the hidden states."""

from polyformer.heads.base import Head, HeadConfig, HeadInput, LastLayer
from polyformer.heads.classification import ClassifyConfig, SpanConfig, TagConfig
from polyformer.heads.embed import EmbedConfig
from polyformer.heads.vocabulary import EnhancedMaskedConfig, LanguageModelConfig, MaskedConfig

__all__ = [
    "ClassifyConfig",
    "EmbedConfig",
    "EnhancedMaskedConfig",
    "Head",
    "HeadConfig",
    "HeadInput",
    "LanguageModelConfig",
    "LastLayer",
    "MaskedConfig",
    "SpanConfig",
    "TagConfig",
]
