"""How to generate: what is asked for, checked."""

import dataclasses

from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig(Config):
    """Greedy unless `do_sample` or `num_beams` say otherwise."""

    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected 1 or more, got {self.max_new_tokens}")
