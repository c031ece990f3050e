"""Configuration of generation, with checks, and settings by name that override it."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Interval, Le
from torch import Tensor

from polyformer.core.config import Config, encode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ranges import (
    NEW_TOKENS,
    TEXTS,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    UnitFloat,
    Wording,
    check_range,
    check_sizes,
)
from polyformer.models.generation.constraints import ConstraintConfig
from polyformer.nn.cache import CachePolicy

Limit = Annotated[PositiveInt, Wording(fix="leave it out for no limit")]
Mass = Annotated[PositiveShare, Wording("a probability", "leave it out for no limit")]
Ways = Annotated[int, Interval(ge=1, le=TEXTS)]
NewTokens = Annotated[int, Interval(ge=1, le=NEW_TOKENS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig(Config):
    """Sampling: these options shape the model's distribution in this order; each token is drawn from it."""

    do_sample: bool = False
    # Logits are divided by it.
    temperature: Annotated[PositiveFloat, Wording(fix="for greedy search leave do_sample out")] = 1.0
    top_k: Limit | None = None  # keep this number of the most likely tokens
    top_p: Mass | None = None  # keep the fewest most likely tokens with this total probability
    min_p: Mass | None = None  # keep tokens with at least this share of the highest probability
    typical_p: Mass | None = None  # keep the fewest most typical tokens with this total probability
    seed: int | None = None  # seed of a generator for this call; None for torch's default generator

    def __post_init__(self) -> None:
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

    num_beams: Ways = 1
    num_beam_groups: PositiveInt = 1
    diversity_penalty: NonNegativeFloat = 0.0  # of log P, per beam of an earlier group with the same token
    normalization: Literal["gnmt", "length"] = "gnmt"
    length_penalty: FiniteFloat = 0.6
    early_stopping: bool | Literal["never"] = "never"

    def __post_init__(self) -> None:
        self._check_groups()
        for field in dataclasses.fields(self):
            if self.num_beams == 1 and getattr(self, field.name) != field.default:
                raise InputError(
                    f"{field.name}: only beam search uses it; set num_beams to 2 or more, or leave it out"
                )

    def _check_groups(self) -> None:
        groups, penalty = self.num_beam_groups, self.diversity_penalty
        if self.num_beams % groups:
            raise InputError(
                f"num_beam_groups: expected a divisor of the {self.num_beams} beams (num_beams), got {groups}"
            )
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
    """Contrastive search, with a `penalty_alpha` above 0 (`generation/search.py`)."""

    penalty_alpha: UnitFloat = 0.0  # weight of the similarity to the text so far, against the probability
    candidates: Annotated[int, Ge(2)] = 4  # most likely tokens, each read once; transformers' `top_k`

    def __post_init__(self) -> None:
        if self.candidates != 4 and not self.penalty_alpha:
            raise InputError(
                "candidates: only contrastive search uses it; set penalty_alpha, or leave it out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DolaConfig(Config):
    """Decoding by contrasting layers, with `dola_layers` (`generation/processors.py`)."""

    dola_layers: Literal["low", "high"] | tuple[int, ...] | None = None  # 0 for the embedding sum

    def __post_init__(self) -> None:
        layers = self.dola_layers
        if isinstance(layers, tuple) and (not layers or min(layers) < 0):
            raise InputError(
                f"dola_layers: expected 'low', 'high' or numbers of layers from 0, got {quote(layers)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeLengthConfig(Config):
    """Limits on the whole text: the prompt with its padding, or the start token, plus the new tokens."""

    max_length: Limit | None = None
    min_length: NonNegativeInt = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig(Config):
    """Number of draft tokens if `generate` has a draft: it changes the speed, not the text."""

    # At most, per pass; by default 5, 10 for a look-up, and as many as a model predicts.
    draft_tokens: PositiveInt | None = None
    lookup_ngram: Annotated[int, Ge(2)] = 3  # the longest run of tokens that a look-up compares, down to 2

    def most(self, lookup: bool) -> int:
        """Return the number of drafts per pass.

        Drafts of a look-up need no pass of another model and come in longer runs, so their default is higher.
        """
        if self.draft_tokens is not None:
            return self.draft_tokens
        return 10 if lookup else 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenoisingConfig(Config):
    """Masked diffusion models: how masks become tokens (`generation/denoising.py`)."""

    denoising_steps: PositiveInt | None = None  # of all new tokens together; None: one for each token
    block_length: PositiveInt | None = None  # tokens written before the next ones; None: all, or the model's
    remasking: Literal["confidence", "entropy", "random"] = "confidence"  # which predictions are kept first


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialIds(Config):
    """Special tokens for generation only; None for the model's tokens."""

    start: int | None = None  # the token that starts an encoder-decoder's output
    eos: tuple[int, ...] | None = None  # each of these tokens ends a text; () for no end
    pad: int | None = None  # fills up texts that have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig(Config):
    """Greedy search, unless `sampling.do_sample` or `beam.num_beams` select another method."""

    max_new_tokens: NewTokens | None = 64  # None if only `whole.max_length` limits the text
    min_new_tokens: NonNegativeInt = 0  # the text does not end earlier; a stop string still ends it
    whole: WholeLengthConfig = WholeLengthConfig()
    num_return_sequences: Ways = 1  # per input: the number of samples, or of best beams
    repetition_penalty: PositiveFloat = 1.0  # above 1 makes every token of the text so far less likely
    constraints: ConstraintConfig = ConstraintConfig()
    stop: tuple[str, ...] = ()  # the text ends once it contains one of these
    special: SpecialIds = SpecialIds()
    sampling: SamplingConfig = SamplingConfig()
    beam: BeamConfig = BeamConfig()
    contrastive: ContrastiveConfig = ContrastiveConfig()
    dola: DolaConfig = DolaConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    denoising: DenoisingConfig = DenoisingConfig()
    cache: CachePolicy | None = None  # which keys the KV cache keeps, and how; None for all as they are

    def __post_init__(self) -> None:
        check_sizes(self)
        self._check_lengths()
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
        check_range(f"max_length: new tokens after {width}", most, Le(NEW_TOKENS))
        return max(self.min_new_tokens, self.whole.min_length - width), most

    def _check_lengths(self) -> None:
        most = self.max_new_tokens
        if most is None and self.whole.max_length is None:
            raise InputError("max_new_tokens: expected a number, or None together with whole.max_length")
        if most is not None and self.min_new_tokens > most:
            raise InputError(
                f"min_new_tokens: expected 0 to max_new_tokens ({most}), got {self.min_new_tokens}"
            )

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


# Names in transformers that differ from the names here.
HUB_NAMES = {
    "decoder_start_token_id": "start",
    "eos_token_id": "eos",
    "pad_token_id": "pad",
    "stop_strings": "stop",
}


def _setting_paths() -> dict[str, tuple[str, ...]]:
    """Return every setting with its path in the configuration."""
    places: dict[str, tuple[str, ...]] = {}
    for field in dataclasses.fields(GenerationConfig):
        places[field.name] = (field.name,)
        if isinstance(field.default, Config):
            places |= {inner.name: (field.name, inner.name) for inner in dataclasses.fields(field.default)}
    return places


SETTING_PATHS = _setting_paths()


def _check_names(named: Mapping[str, Any]) -> None:
    for name, value in named.items():
        if name not in SETTING_PATHS:
            raise unknown("argument or setting of generate", name, {*SETTING_PATHS, *HUB_NAMES})
        if isinstance(value, Tensor):
            raise InputError(f"{name}: expected a plain value, got {quote(value)}; use .tolist()")


def with_settings(config: GenerationConfig, settings: Mapping[str, Any]) -> GenerationConfig:
    """Return `config` with `settings` by name, with this library's or transformers' names.

    As in transformers, `max_new_tokens` and `max_length` replace each other; `do_sample=False` and
    `num_beams=1` reset all settings of the method that they turn off. Raises `InputError` for an unknown
    name, with the nearest name.
    """
    if not settings:
        return config
    # Parts stay as they are until a setting changes them.
    tree: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    named = {HUB_NAMES.get(name, name): value for name, value in settings.items()}
    alpha = named.get("penalty_alpha", config.contrastive.penalty_alpha)
    if alpha and named.get("top_k") is not None and not named.get("do_sample"):  # as in transformers
        named["candidates"] = named.pop("top_k")
    _check_names(named)
    for name, off in (("do_sample", False), ("num_beams", 1), ("penalty_alpha", 0)):
        if name in named and named[name] == off:
            tree[SETTING_PATHS[name][0]] = {}
    if named.get("max_new_tokens") is not None:
        tree["whole"] = dataclasses.replace(config.whole, max_length=None)
    elif named.get("max_length") is not None:
        tree["max_new_tokens"] = None
    for name, value in named.items():
        *part, last = SETTING_PATHS[name]
        plural = name in ("eos", "stop") and isinstance(value, int | str)
        if part and isinstance(tree[part[0]], Config):
            tree[part[0]] = tree[part[0]].to_dict()
        place = tree[part[0]] if part else tree
        if not isinstance(place, dict):
            raise InputError(f"{part[0]} and {name}: expected one of the two, got both")
        place[last] = [value] if plural else encode(value)
    return GenerationConfig.from_dict(tree)
