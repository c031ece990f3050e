"""Generation: searches with decoders and encoder-decoders, and denoising with masked diffusion models."""

from polyformer.models.generation.config import (
    BeamConfig,
    ContrastiveConfig,
    DenoisingConfig,
    DolaConfig,
    GenerationConfig,
    SamplingConfig,
    SpecialIds,
    SpeculationConfig,
    WholeLengthConfig,
)
from polyformer.models.generation.constraints import ConstraintConfig
from polyformer.models.generation.decoder import Mixture, Retrieval
from polyformer.models.generation.generate import generate
from polyformer.models.generation.results import (
    ContinuedText,
    Decode,
    DraftStatistics,
    Generated,
    TextStreamer,
)
from polyformer.models.generation.speculation import Draft, Drafter, Drafts

__all__ = [
    "BeamConfig",
    "ConstraintConfig",
    "ContinuedText",
    "ContrastiveConfig",
    "Decode",
    "DenoisingConfig",
    "DolaConfig",
    "Draft",
    "DraftStatistics",
    "Drafter",
    "Drafts",
    "Generated",
    "GenerationConfig",
    "Mixture",
    "Retrieval",
    "SamplingConfig",
    "SpecialIds",
    "SpeculationConfig",
    "TextStreamer",
    "WholeLengthConfig",
    "generate",
]
