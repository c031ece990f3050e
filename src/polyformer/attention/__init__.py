"""Attention mechanisms, one file or package each."""

from polyformer.attention.adaptive_span import AdaptiveSpanConfig
from polyformer.attention.alternate import AlternateConfig
from polyformer.attention.dynamic_span import DynamicSpanConfig
from polyformer.attention.linear.performer import PerformerConfig
from polyformer.attention.linear.rfa import RFAConfig
from polyformer.attention.linformer import LinformerConfig
from polyformer.attention.lsh import LSHConfig
from polyformer.attention.memory_compressed import MemoryCompressedConfig
from polyformer.attention.routing import RoutingConfig
from polyformer.attention.sinkhorn import SinkhornConfig, SortCutConfig
from polyformer.attention.softmax_attention import SoftmaxConfig
from polyformer.attention.svd import SVDConfig
from polyformer.core.registry import import_modules

__all__ = [
    "AdaptiveSpanConfig",
    "AlternateConfig",
    "DynamicSpanConfig",
    "LSHConfig",
    "LinformerConfig",
    "MemoryCompressedConfig",
    "PerformerConfig",
    "RFAConfig",
    "RoutingConfig",
    "SVDConfig",
    "SinkhornConfig",
    "SoftmaxConfig",
    "SortCutConfig",
]

import_modules(__name__)
