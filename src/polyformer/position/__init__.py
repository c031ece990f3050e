"""Position schemes, one file each."""

from polyformer.position.base import Position, PositionConfig
from polyformer.position.learned import Learned, LearnedConfig, LearnedPerLayerConfig
from polyformer.position.none import NoPositionConfig
from polyformer.position.sinusoidal import Sinusoidal, SinusoidalConfig, sinusoids

__all__ = [
    "Learned",
    "LearnedConfig",
    "LearnedPerLayerConfig",
    "NoPositionConfig",
    "Position",
    "PositionConfig",
    "Sinusoidal",
    "SinusoidalConfig",
    "sinusoids",
]
