"""How to generate: what is asked for, checked."""

import dataclasses
import math
from typing import ClassVar, Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Draw each token from the model's distribution, after these have shaped it, in this order."""

    do_sample: bool = False
    temperature: float = 1.0  # logits are divided by it
    top_k: int | None = None  # keep so many of the likeliest tokens
    top_p: float | None = None  # keep the fewest likeliest tokens that together have this probability
    seed: int | None = None  # of this call's own generator; None draws one

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(
                f"temperature: expected a number above 0, got {self.temperature}; "
                "for the likeliest token every time leave do_sample out"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k: expected 1 or more, or None for no limit, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise InputError(
                f"top_p: expected a probability in (0, 1], or None for no limit, got {self.top_p}"
            )
        for field in dataclasses.fields(self):
            if not self.do_sample and getattr(self, field.name) != field.default:
                raise InputError(f"{field.name}: only sampling uses it; set do_sample, or leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig(Config):
    """Beam search, with 2 beams or more. The paper of 2017 uses 4 and 0.6 (section 6.1)."""

    num_beams: int = 1
    length_penalty: float = 0.6  # alpha in ((5 + |Y|) / 6)^alpha, which divides log P(Y | X)
    early_stopping: bool = False  # stop once num_beams texts have ended, even if a longer one could win

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise InputError(f"num_beams: expected 1 or more, got {self.num_beams}")
        if not math.isfinite(self.length_penalty):
            raise InputError(f"length_penalty: expected a finite number, got {self.length_penalty}")
        for field in dataclasses.fields(self):
            if self.num_beams == 1 and getattr(self, field.name) != field.default:
                raise InputError(
                    f"{field.name}: only beam search uses it; set num_beams to 2 or more, or leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig(Config):
    """The likeliest token every time, unless `sampling.do_sample` or `beam.num_beams` say otherwise."""

    max_new_tokens: int = 64
    min_new_tokens: int = 0  # the text does not end before it has so many; a stop string still ends it
    num_return_sequences: int = 1  # of every input: so many samples, or the so many best beams
    repetition_penalty: float = 1.0  # above 1 makes every token of the text so far less likely
    stop: tuple[str, ...] = ()  # the text ends once it contains one of these
    sampling: SamplingConfig = SamplingConfig()
    beam: BeamConfig = BeamConfig()

    row: ClassVar[str] = "A6"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected 1 or more, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens: expected 0 to max_new_tokens ({self.max_new_tokens}), "
                f"got {self.min_new_tokens}"
            )
        if self.num_return_sequences < 1:
            raise InputError(f"num_return_sequences: expected 1 or more, got {self.num_return_sequences}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise InputError(f"repetition_penalty: expected a number above 0, got {self.repetition_penalty}")
        if not all(self.stop):
            raise InputError("stop: expected texts of one character or more, got an empty one")
        if self.method == "beam" and self.sampling.do_sample:
            raise InputError("do_sample and num_beams: beam search does not sample; leave one of them out")
        self._check_count()

    @property
    def method(self) -> Literal["greedy", "sample", "beam"]:
        """How the next token is chosen."""
        if self.beam.num_beams > 1:
            return "beam"
        return "sample" if self.sampling.do_sample else "greedy"

    def _check_count(self) -> None:
        count = self.num_return_sequences
        if self.method == "greedy" and count > 1:
            raise InputError(
                f"num_return_sequences: greedy search has one answer, got {count}; sample or use beams"
            )
        if self.method == "beam" and count > self.beam.num_beams:
            raise InputError(
                f"num_return_sequences: expected at most num_beams ({self.beam.num_beams}), got {count}"
            )
