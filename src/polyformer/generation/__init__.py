"""Generation: greedy search, sampling and beam search, for decoders and encoder-decoders."""

from polyformer.generation.config import (
    BeamConfig,
    ContrastiveConfig,
    DolaConfig,
    GenerationConfig,
    SamplingConfig,
    SpecialIds,
    SpeculationConfig,
    WholeLengthConfig,
)
from polyformer.generation.constraints import ConstraintConfig
from polyformer.generation.decoder import Mixture, Retrieval
from polyformer.generation.draft import Draft
from polyformer.generation.drafter import Drafter, Drafts
from polyformer.generation.generate import generate
from polyformer.generation.generated import Drafted, Generated
from polyformer.generation.stopping import Decode
from polyformer.generation.streaming import TextStreamer

__all__ = [
    "BeamConfig",
    "ConstraintConfig",
    "ContrastiveConfig",
    "Decode",
    "DolaConfig",
    "Draft",
    "Drafted",
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
