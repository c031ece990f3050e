"""Heads: modules that compute predictions and losses from the hidden states."""

from polyformer.core.registry import import_modules
from polyformer.nn.heads.adaptive import AdaptiveSoftmaxConfig
from polyformer.nn.heads.base import (
    Head,
    HeadConfig,
    HeadInput,
    HeadShape,
    LastLayer,
    ResidualConfig,
    TransformConfig,
)
from polyformer.nn.heads.classification import (
    ChooseConfig,
    ClassifyConfig,
    SpanConfig,
    TagConfig,
)
from polyformer.nn.heads.common_space import EmbedAttendedConfig, EmbedProjectedConfig
from polyformer.nn.heads.distilled import DistilledConfig
from polyformer.nn.heads.embed import EmbedConfig
from polyformer.nn.heads.image import ClassifyImageConfig, EmbedImageConfig
from polyformer.nn.heads.pretraining import (
    DetectConfig,
    EnhancedMaskedConfig,
    MaskedConfig,
    PretrainingConfig,
)
from polyformer.nn.heads.vocabulary import LanguageModelConfig, SemiparametricConfig

__all__ = [
    "AdaptiveSoftmaxConfig",
    "ChooseConfig",
    "ClassifyConfig",
    "ClassifyImageConfig",
    "DetectConfig",
    "DistilledConfig",
    "EmbedAttendedConfig",
    "EmbedConfig",
    "EmbedImageConfig",
    "EmbedProjectedConfig",
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
