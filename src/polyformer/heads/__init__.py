"""Heads: what is predicted from the hidden states."""

from polyformer.heads.base import Head, HeadConfig, HeadInput
from polyformer.heads.classification import ClassifyConfig, SpanConfig, TagConfig
from polyformer.heads.embed import EmbedConfig
from polyformer.heads.vocabulary import LanguageModelConfig, MaskedConfig

__all__ = [
    "ClassifyConfig",
    "EmbedConfig",
    "Head",
    "HeadConfig",
    "HeadInput",
    "LanguageModelConfig",
    "MaskedConfig",
    "SpanConfig",
    "TagConfig",
]
