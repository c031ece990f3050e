"""Generation."""

from polyformer.generation.config import GenerationConfig
from polyformer.generation.generate import Generated, generate

__all__ = ["Generated", "GenerationConfig", "generate"]
