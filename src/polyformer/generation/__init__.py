"""Generation: greedy search, sampling and beam search, for decoders and encoder-decoders."""

from polyformer.generation.config import (
    BeamConfig,
    GenerationConfig,
    SamplingConfig,
    SpecialIds,
    WholeLengthConfig,
)
from polyformer.generation.constraints import ConstraintConfig
from polyformer.generation.generate import generate
from polyformer.generation.generated import Generated
from polyformer.generation.stopping import Decode
from polyformer.generation.streaming import TextStreamer

__all__ = [
    "BeamConfig",
    "ConstraintConfig",
    "Decode",
    "Generated",
    "GenerationConfig",
    "SamplingConfig",
    "SpecialIds",
    "TextStreamer",
    "WholeLengthConfig",
    "generate",
]
