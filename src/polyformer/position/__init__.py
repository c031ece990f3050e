"""Position schemes, each in a separate file."""

from polyformer.core.registry import import_modules
from polyformer.position.alibi import AlibiConfig
from polyformer.position.axial import AxialConfig
from polyformer.position.base import (
    Position,
    PositionConfig,
    Shape,
    Site,
    Terms,
    changes_scores,
    related,
    sinusoids,
)
from polyformer.position.concatenated import ConcatenatedConfig
from polyformer.position.da import DistanceAwareConfig
from polyformer.position.deberta import DebertaConfig
from polyformer.position.etc_labels import EtcLabelsConfig
from polyformer.position.grid import GridConfig
from polyformer.position.learned import Learned, LearnedConfig, LearnedPerLayerConfig
from polyformer.position.none import NoPositionConfig
from polyformer.position.relation_labels import RelationBiasConfig, RelationLabelsConfig
from polyformer.position.rope.rope import RopeConfig
from polyformer.position.shaw import ShawConfig
from polyformer.position.sinusoidal import Sinusoidal, SinusoidalConfig
from polyformer.position.step_sinusoid import StepSinusoidConfig
from polyformer.position.t5 import T5BiasConfig
from polyformer.position.transformer_xl import TransformerXLConfig

__all__ = [
    "AlibiConfig",
    "AxialConfig",
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
    "Sinusoidal",
    "SinusoidalConfig",
    "Site",
    "StepSinusoidConfig",
    "T5BiasConfig",
    "Terms",
    "TransformerXLConfig",
    "changes_scores",
    "related",
    "sinusoids",
]

import_modules(__name__)
