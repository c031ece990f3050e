"""Position schemes, each in a separate file."""

from polyformer.attention.positions.alibi import AlibiConfig
from polyformer.attention.positions.axial import AxialConfig
from polyformer.attention.positions.base import (
    BoundPosition,
    Position,
    PositionConfig,
    Shape,
    Site,
    sinusoids,
    with_relations,
)
from polyformer.attention.positions.concatenated import ConcatenatedConfig
from polyformer.attention.positions.deberta import DebertaConfig
from polyformer.attention.positions.distance_aware import DistanceAwareConfig
from polyformer.attention.positions.etc_labels import EtcLabelsConfig
from polyformer.attention.positions.grid import GridConfig
from polyformer.attention.positions.learned import Learned, LearnedConfig, LearnedPerLayerConfig
from polyformer.attention.positions.no_position import NoPositionConfig
from polyformer.attention.positions.relation_labels import RelationBiasConfig, RelationLabelsConfig
from polyformer.attention.positions.rope.rope import RopeConfig
from polyformer.attention.positions.shaw import ShawConfig
from polyformer.attention.positions.sink_cache import SinkCache
from polyformer.attention.positions.sinusoidal import Sinusoidal, SinusoidalConfig
from polyformer.attention.positions.step_sinusoid import StepSinusoidConfig
from polyformer.attention.positions.t5 import T5BiasConfig
from polyformer.attention.positions.transformer_xl import TransformerXLConfig
from polyformer.core.registry import import_modules

__all__ = [
    "AlibiConfig",
    "AxialConfig",
    "BoundPosition",
    "ConcatenatedConfig",
    "DebertaConfig",
    "DistanceAwareConfig",
    "EtcLabelsConfig",
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
    "sinusoids",
    "with_relations",
]

import_modules(__name__)
