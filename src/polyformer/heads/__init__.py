"""Heads: modules that compute predictions and losses from the hidden states."""

from polyformer.core.registry import import_modules
from polyformer.heads.adaptive import AdaptiveSoftmaxConfig
from polyformer.heads.base import Head, HeadConfig, HeadInput, HeadShape, LastLayer
from polyformer.heads.choose import ChooseConfig
from polyformer.heads.classification import ClassifyConfig, SpanConfig, TagConfig
from polyformer.heads.detection import DetectConfig
from polyformer.heads.distilled import DistilledConfig
from polyformer.heads.embed import EmbedConfig
from polyformer.heads.masked import EnhancedMaskedConfig, MaskedConfig
from polyformer.heads.pretraining import PretrainingConfig
from polyformer.heads.semiparametric import SemiparametricConfig
from polyformer.heads.transform import ResidualConfig, TransformConfig
from polyformer.heads.vocabulary import LanguageModelConfig

__all__ = [
    "AdaptiveSoftmaxConfig",
    "ChooseConfig",
    "ClassifyConfig",
    "DetectConfig",
    "DistilledConfig",
    "EmbedConfig",
    "EnhancedMaskedConfig",
    "Head",
    "HeadConfig",
    "HeadInput",
    "HeadShape",
    "LanguageModelConfig",
    "LastLayer",
    "MaskedConfig",
    "PretrainingConfig",
    "ResidualConfig",
    "SemiparametricConfig",
    "SpanConfig",
    "TagConfig",
    "TransformConfig",
]

import_modules(__name__)
