"""Attention mechanisms, one file or package each."""

from polyformer.attention.mechanisms.adaptive_span import AdaptiveSpanConfig
from polyformer.attention.mechanisms.alternate import AlternateConfig
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig, ScoreTerms
from polyformer.attention.mechanisms.chosen_blocks.moba import MobaConfig
from polyformer.attention.mechanisms.chosen_blocks.nsa import NSAConfig
from polyformer.attention.mechanisms.chosen_blocks.top_blocks import TopBlocksConfig
from polyformer.attention.mechanisms.differential import DifferentialConfig
from polyformer.attention.mechanisms.dynamic_span import DynamicSpanConfig
from polyformer.attention.mechanisms.forgetting import ForgettingConfig
from polyformer.attention.mechanisms.linear.performer import PerformerConfig
from polyformer.attention.mechanisms.linear.rfa import RFAConfig
from polyformer.attention.mechanisms.linformer import LinformerConfig
from polyformer.attention.mechanisms.lsh import LSHConfig
from polyformer.attention.mechanisms.memory_compressed import MemoryCompressedConfig
from polyformer.attention.mechanisms.pair_weights import PairWeights, PairWeightsConfig
from polyformer.attention.mechanisms.recurrence.delta import DeltaConfig
from polyformer.attention.mechanisms.recurrence.gated_delta import GatedDeltaConfig
from polyformer.attention.mechanisms.recurrence.gla import GLAConfig
from polyformer.attention.mechanisms.recurrence.linear import LinearAttentionConfig
from polyformer.attention.mechanisms.recurrence.retention import RetentionConfig
from polyformer.attention.mechanisms.recurrence.ssd import SSDConfig
from polyformer.attention.mechanisms.routing import RoutingConfig
from polyformer.attention.mechanisms.sinkhorn import SinkhornConfig, SortCutConfig
from polyformer.attention.mechanisms.softmax_attention import SoftmaxConfig
from polyformer.attention.mechanisms.svd import SVDConfig
from polyformer.core.registry import import_modules

__all__ = [
    "AdaptiveSpanConfig",
    "AlternateConfig",
    "DeltaConfig",
    "DifferentialConfig",
    "DynamicSpanConfig",
    "ForgettingConfig",
    "GLAConfig",
    "GatedDeltaConfig",
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
    "RFAConfig",
    "RetentionConfig",
    "RoutingConfig",
    "SSDConfig",
    "SVDConfig",
    "ScoreTerms",
    "SinkhornConfig",
    "SoftmaxConfig",
    "SortCutConfig",
    "TopBlocksConfig",
]

import_modules(__name__)
