"""Position schemes, one file each."""

from polyformer.position.alibi import AlibiConfig
from polyformer.position.base import Position, PositionConfig, Shape, Site, changes_scores
from polyformer.position.etc_labels import EtcLabelsConfig
from polyformer.position.grid import GridConfig
from polyformer.position.learned import Learned, LearnedConfig, LearnedPerLayerConfig
from polyformer.position.none import NoPositionConfig
from polyformer.position.sinusoidal import Sinusoidal, SinusoidalConfig, sinusoids
from polyformer.position.t5 import T5BiasConfig

__all__ = [
    "AlibiConfig",
    "EtcLabelsConfig",
    "GridConfig",
    "Learned",
    "LearnedConfig",
    "LearnedPerLayerConfig",
    "NoPositionConfig",
    "Position",
    "PositionConfig",
    "Shape",
    "Sinusoidal",
    "SinusoidalConfig",
    "Site",
    "T5BiasConfig",
    "changes_scores",
    "sinusoids",
]
