"""Configuration of generation, with checks."""

import dataclasses
import math
from typing import Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import NEW_TOKENS, WAYS
from polyformer.core.sizes import check_most, check_sizes
from polyformer.models.generation.constraints import ConstraintConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Sampling: these options shape the model's distribution in this order; each token is drawn from it."""

    do_sample: bool = False
    temperature: float = 1.0  # logits are divided by it
    top_k: int | None = None  # keep this number of the most likely tokens
    top_p: float | None = None  # keep the fewest most likely tokens with this total probability
    min_p: float | None = None  # keep tokens with at least this share of the highest probability
    typical_p: float | None = None  # keep the fewest most typical tokens with this total probability
    seed: int | None = None  # seed of a generator for this call; None for torch's default generator

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(
                f"temperature: expected a number above 0, got {self.temperature}; "
                "for greedy search leave do_sample out"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k: expected 1 or more, or None for no limit, got {self.top_k}")
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise InputError(
                    f"{name}: expected a probability in (0, 1], or None for no limit, got {value}"
                )
        for field in dataclasses.fields(self):
            if not self.do_sample and getattr(self, field.name) != field.default:
                raise InputError(f"{field.name}: only sampling uses it; set do_sample, or leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamConfig(Config):
    """Beam search, with at least 2 beams. The paper of 2017 uses 4 and 0.6 (section 6.1).

    A text Y of |Y| tokens, including the end token but not the prompt, scores log P(Y | X) divided by

        "gnmt"      ((5 + |Y|) / 6)^length_penalty      Wu et al. 2016, section 7
        "length"    |Y|^length_penalty                  transformers

    `early_stopping` applies once num_beams texts have ended. True: stop. False: stop if the best beam would
    not be among them if it ended at its current length; a longer text could still win if length is rewarded.
    "never": stop when no later text can win.

    With groups, each has num_beams / num_beam_groups of the beams, and is penalized for the tokens of earlier
    groups (`generation/beam_search.py`).
    """

    num_beams: int = 1
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0  # subtracted from log P per beam of an earlier group with the same token
    normalization: Literal["gnmt", "length"] = "gnmt"
    length_penalty: float = 0.6
    early_stopping: bool | Literal["never"] = "never"

    def __post_init__(self) -> None:
        if self.num_beams < 1:
            raise InputError(f"num_beams: expected 1 or more, got {self.num_beams}")
        if self.normalization not in ("gnmt", "length"):
            raise InputError(f"normalization: expected 'gnmt' or 'length', got {quote(self.normalization)}")
        if not math.isfinite(self.length_penalty):
            raise InputError(f"length_penalty: expected a finite number, got {self.length_penalty}")
        self._check_groups()
        if self.early_stopping not in (True, False, "never"):
            raise InputError(
                f"early_stopping: expected true, false or 'never', got {quote(self.early_stopping)}"
            )
        for field in dataclasses.fields(self):
            if self.num_beams == 1 and getattr(self, field.name) != field.default:
                raise InputError(
                    f"{field.name}: only beam search uses it; set num_beams to 2 or more, or leave it out"
                )

    def _check_groups(self) -> None:
        groups, penalty = self.num_beam_groups, self.diversity_penalty
        if groups < 1 or self.num_beams % groups:
            raise InputError(
                f"num_beam_groups: expected a divisor of the {self.num_beams} beams (num_beams), got {groups}"
            )
        if not (penalty >= 0 and math.isfinite(penalty)):
            raise InputError(f"diversity_penalty: expected a number of 0 or more, got {penalty}")
        if (groups > 1) != (penalty > 0):
            raise InputError(
                f"num_beam_groups and diversity_penalty: expected 2 groups or more and a penalty above 0, "
                f"or neither, got {groups} and {penalty:g}"
            )

    def divisor(self, length: int) -> float:
        """Return the divisor of log P for a text of `length` tokens."""
        base = (5 + length) / 6 if self.normalization == "gnmt" else float(length)
        return base**self.length_penalty


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(Config):
    """Contrastive search, with a `penalty_alpha` above 0 (`generation/contrastive_search.py`)."""

    penalty_alpha: float = 0.0  # weight of the similarity to the text so far, against the probability
    candidates: int = 4  # the number of most likely tokens, each read once; transformers' `top_k`

    def __post_init__(self) -> None:
        if not 0.0 <= self.penalty_alpha <= 1.0:
            raise InputError(
                f"penalty_alpha: expected a weight in (0, 1], or 0 for none, got {self.penalty_alpha}"
            )
        if self.candidates < 2:
            raise InputError(f"candidates: expected 2 or more, among which to choose, got {self.candidates}")
        if self.candidates != 4 and not self.penalty_alpha:
            raise InputError(
                "candidates: only contrastive search uses it; set penalty_alpha, or leave it out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DolaConfig(Config):
    """Decoding by contrasting layers, with `dola_layers` (`generation/dola.py`)."""

    dola_layers: Literal["low", "high"] | tuple[int, ...] | None = None  # 0 for the embedding sum

    def __post_init__(self) -> None:
        layers = self.dola_layers
        if layers is None or layers in ("low", "high"):
            return
        if isinstance(layers, str) or not layers or any(layer < 0 for layer in layers):
            raise InputError(
                f"dola_layers: expected 'low', 'high' or numbers of layers from 0, got {quote(layers)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeLengthConfig(Config):
    """Limits on the whole text: the prompt with its padding, or the start token, plus the new tokens."""

    max_length: int | None = None
    min_length: int = 0

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise InputError(f"max_length: expected 1 or more, or None for no limit, got {self.max_length}")
        if self.min_length < 0:
            raise InputError(f"min_length: expected 0 or more, got {self.min_length}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Config):
    """Number of draft tokens if `generate` has a draft: it changes the speed, not the text."""

    draft_tokens: int | None = None  # at most, for each pass of the model; by default 5, or 10 for a look-up
    lookup_ngram: int = 3  # the longest run of tokens that a look-up compares, down to 2

    def __post_init__(self) -> None:
        if self.draft_tokens is not None and self.draft_tokens < 1:
            raise InputError(f"draft_tokens: expected 1 or more, got {self.draft_tokens}")
        if self.lookup_ngram < 2:
            raise InputError(f"lookup_ngram: expected 2 or more, got {self.lookup_ngram}")

    def most(self, lookup: bool) -> int:
        """Return the number of drafts per pass.

        Drafts of a look-up need no pass of another model and come in longer runs, so their default is higher.
        """
        if self.draft_tokens is not None:
            return self.draft_tokens
        return 10 if lookup else 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialIds(Config):
    """Special tokens for generation only; None for the model's tokens."""

    start: int | None = None  # the token that starts an encoder-decoder's output
    eos: tuple[int, ...] | None = None  # each of these tokens ends a text; () for no end
    pad: int | None = None  # fills up texts that have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig(Config):
    """Greedy search, unless `sampling.do_sample` or `beam.num_beams` select another method."""

    max_new_tokens: int | None = 64  # None if only `whole.max_length` limits the text
    min_new_tokens: int = 0  # the text does not end before this length; a stop string still ends it
    whole: WholeLengthConfig = WholeLengthConfig()
    num_return_sequences: int = 1  # per input: the number of samples, or of best beams
    repetition_penalty: float = 1.0  # above 1 makes every token of the text so far less likely
    constraints: ConstraintConfig = ConstraintConfig()
    stop: tuple[str, ...] = ()  # the text ends once it contains one of these
    special: SpecialIds = SpecialIds()
    sampling: SamplingConfig = SamplingConfig()
    beam: BeamConfig = BeamConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    dola: DolaConfig = DolaConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    def __post_init__(self) -> None:
        check_most("max_new_tokens", self.max_new_tokens, NEW_TOKENS)
        check_most("num_return_sequences", self.num_return_sequences, WAYS)
        check_most("num_beams", self.beam.num_beams, WAYS)
        check_sizes(self)
        self._check_lengths()
        if self.num_return_sequences < 1:
            raise InputError(f"num_return_sequences: expected 1 or more, got {self.num_return_sequences}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise InputError(f"repetition_penalty: expected a number above 0, got {self.repetition_penalty}")
        if not all(self.stop):
            raise InputError("stop: expected texts of one character or more, got an empty one")
        if self.method == "beam" and self.sampling.do_sample:
            raise InputError("do_sample and num_beams: beam search does not sample; leave one of them out")
        self._check_contrasts()
        self._check_count()

    @property
    def method(self) -> Literal["greedy", "sample", "beam", "contrastive"]:
        """The method that chooses the next token."""
        if self.contrastive.penalty_alpha:
            return "contrastive"
        if self.beam.num_beams > 1:
            return "beam"
        return "sample" if self.sampling.do_sample else "greedy"

    def lengths(self, width: int) -> tuple[int, int]:
        """Return the least and the greatest number of new tokens after a beginning of `width` tokens.

        Raises `InputError` if no token may be generated.
        """
        longest = self.whole.max_length
        if longest is not None and longest <= width:
            raise InputError(
                f"max_length: the text begins with {width} tokens (prompt and padding) and may have "
                f"{longest}; raise it, shorten the prompt, or give max_new_tokens instead"
            )
        limits = [self.max_new_tokens, None if longest is None else longest - width]
        most = min(limit for limit in limits if limit is not None)
        check_most(f"max_length: new tokens after {width}", most, NEW_TOKENS)
        return max(self.min_new_tokens, self.whole.min_length - width), most

    def _check_lengths(self) -> None:
        most = self.max_new_tokens
        if most is None and self.whole.max_length is None:
            raise InputError("max_new_tokens: expected a number, or None together with whole.max_length")
        if most is not None and most < 1:
            raise InputError(f"max_new_tokens: expected 1 or more, got {most}")
        if self.min_new_tokens < 0 or (most is not None and self.min_new_tokens > most):
            limit = "" if most is None else f" to max_new_tokens ({most})"
            raise InputError(f"min_new_tokens: expected 0{limit or ' or more'}, got {self.min_new_tokens}")

    def _check_contrasts(self) -> None:
        """Raise `InputError` for options that exclude one another."""
        others = {
            "do_sample": self.sampling.do_sample,
            "num_beams": self.beam.num_beams > 1,
            "dola_layers": self.dola.dola_layers is not None,
        }
        if self.contrastive.penalty_alpha:
            for name in (name for name, chosen in others.items() if chosen):
                raise InputError(
                    f"penalty_alpha and {name}: contrastive search already chooses among the most likely "
                    "tokens; leave one of them out"
                )
        if others["dola_layers"] and others["num_beams"]:
            raise InputError(
                "dola_layers and num_beams: beams compare probabilities of whole texts, but contrasts of "
                "layers are not probabilities; leave one of them out"
            )

    def _check_count(self) -> None:
        count = self.num_return_sequences
        if self.method in ("greedy", "contrastive") and count > 1:
            raise InputError(
                f"num_return_sequences: {self.method} search returns one text, got {count}; "
                "sample or use beams"
            )
        if self.method == "beam" and count > self.beam.num_beams:
            raise InputError(
                f"num_return_sequences: expected at most num_beams ({self.beam.num_beams}), got {count}"
            )
