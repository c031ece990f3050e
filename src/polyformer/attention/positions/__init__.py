"""Position schemes, each in a separate file."""

from polyformer.attention.positions.added import (
    AxialConfig,
    ConcatenatedConfig,
    GridConfig,
    Learned,
    LearnedConfig,
    LearnedPerLayerConfig,
    NoPositionConfig,
    Sinusoidal,
    SinusoidalConfig,
    StepSinusoidConfig,
)
from polyformer.attention.positions.base import (
    BoundPosition,
    Position,
    PositionConfig,
    Shape,
    SinkCache,
    Site,
    sinusoids,
    with_relations,
)
from polyformer.attention.positions.by_distance import (
    AlibiConfig,
    DistanceAwareConfig,
    ShawConfig,
    T5BiasConfig,
)
from polyformer.attention.positions.deberta import DebertaConfig
from polyformer.attention.positions.grid_bias import GridBiasConfig
from polyformer.attention.positions.labels import EtcLabelsConfig, RelationBiasConfig, RelationLabelsConfig
from polyformer.attention.positions.rope import RopeConfig, XposConfig
from polyformer.attention.positions.transformer_xl import TransformerXLConfig, XLNetConfig
from polyformer.core.registry import import_modules

__all__ = [
    "AlibiConfig",
    "AxialConfig",
    "BoundPosition",
    "ConcatenatedConfig",
    "DebertaConfig",
    "DistanceAwareConfig",
    "EtcLabelsConfig",
    "GridBiasConfig",
    "GridConfig",
    "Learned",
    "LearnedConfig",
    "LearnedPerLayerConfig",
    "NoPositionConfig",
    "Position",
    "PositionConfig",
    "RelationBiasConfig",
    "RelationLabelsConfig",
    "RopeConfig",
    "Shape",
    "ShawConfig",
    "SinkCache",
    "Sinusoidal",
    "SinusoidalConfig",
    "Site",
    "StepSinusoidConfig",
    "T5BiasConfig",
    "TransformerXLConfig",
    "XLNetConfig",
    "XposConfig",
    "sinusoids",
    "with_relations",
]

import_modules(__name__)
