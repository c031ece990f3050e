"""Attention mechanisms, one file or package each."""

from polyformer.attention.mechanisms.alternate import AlternateConfig
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.attention.mechanisms.chosen_blocks import MobaConfig, NSAConfig, TopBlocksConfig
from polyformer.attention.mechanisms.forgetting import ForgettingConfig
from polyformer.attention.mechanisms.gated_convolution import GatedConvolutionConfig
from polyformer.attention.mechanisms.linear.feature_attention import PerformerConfig, RFAConfig
from polyformer.attention.mechanisms.linformer import LinformerConfig
from polyformer.attention.mechanisms.lsh import LSHConfig
from polyformer.attention.mechanisms.memory_compressed import MemoryCompressedConfig
from polyformer.attention.mechanisms.pair_weights import PairWeights, PairWeightsConfig
from polyformer.attention.mechanisms.recurrence.delta import DeltaConfig, GatedDeltaConfig, KDAConfig
from polyformer.attention.mechanisms.recurrence.members import (
    GLAConfig,
    LinearAttentionConfig,
    RetentionConfig,
    SSDConfig,
)
from polyformer.attention.mechanisms.recurrence.rwkv7 import RWKV7Config
from polyformer.attention.mechanisms.routing import RoutingConfig
from polyformer.attention.mechanisms.sinkhorn import SinkhornConfig, SortCutConfig
from polyformer.attention.mechanisms.softmax_attention import (
    DifferentialConfig,
    PersistentConfig,
    SoftmaxConfig,
    SVDConfig,
)
from polyformer.attention.mechanisms.spans import AdaptiveSpanConfig, DynamicSpanConfig
from polyformer.attention.mechanisms.weight_rules import (
    CopeConfig,
    CosineConfig,
    SelectiveConfig,
    SigmoidConfig,
    TalkingHeadsConfig,
)
from polyformer.core.registry import import_modules

__all__ = [
    "AdaptiveSpanConfig",
    "AlternateConfig",
    "CopeConfig",
    "CosineConfig",
    "DeltaConfig",
    "DifferentialConfig",
    "DynamicSpanConfig",
    "ForgettingConfig",
    "GLAConfig",
    "GatedConvolutionConfig",
    "GatedDeltaConfig",
    "KDAConfig",
    "LSHConfig",
    "LinearAttentionConfig",
    "LinformerConfig",
    "Mechanism",
    "MechanismConfig",
    "MemoryCompressedConfig",
    "MobaConfig",
    "NSAConfig",
    "PairWeights",
    "PairWeightsConfig",
    "PerformerConfig",
    "PersistentConfig",
    "RFAConfig",
    "RWKV7Config",
    "RetentionConfig",
    "RoutingConfig",
    "SSDConfig",
    "SVDConfig",
    "ScoreTerms",
    "SelectiveConfig",
    "SigmoidConfig",
    "SinkhornConfig",
    "SoftmaxConfig",
    "SortCutConfig",
    "TalkingHeadsConfig",
    "TopBlocksConfig",
]

import_modules(__name__)
