"""Thresholds of early exits with a guaranteed risk, by Learn then Test.

`calibrate` generates texts with the full model and with lower and lower thresholds, compares them, and saves
the lowest threshold for which the risk is shown to be small enough, with the guarantee, in the model's
configuration.

The losses L_1 .. L_n of n texts at threshold lambda are in [0, 1], with mean L and expectation R(lambda). If
R > delta, a mean as low as the measured mean has at most the probability (Hoeffding, Bentkus)

    p = min(exp(-n h(min(L, delta), delta)), e P(Binomial(n, delta) <= ceil(n L)))
    h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b))

Thresholds are tested from the most conservative down, each at level epsilon = 1 - confidence, until the first
failure (fixed sequence testing). The probability that any threshold that passed has R > delta is at most
epsilon, for any model, distribution of texts and number of thresholds. Angelopoulos et al. 2021 (Learn then
Test), section 2 and appendix; Schuster et al. 2022 (CALM), section 4.2, algorithm 1.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Interval
from scipy.stats import binom

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import UnitFloat, Wording
from polyformer.data.formats.published import RougeTokenizer, scorer
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation import ContinuedText, Decode, GenerationConfig
from polyformer.nn.depth import full_depth, recorded_depths
from polyformer.nn.depth.exits import CalibrationConfig, ExitsConfig, set_threshold

__all__ = [
    "CalibrateConfig",
    "CalibrationResult",
    "bentkus",
    "calibrate",
    "hoeffding_bentkus",
    "lowest_valid",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Config):
    """A guarantee: with probability `confidence`, the expected loss of quality is at most `risk`.

    measure: "consistency", 1 minus ROUGE-L between the texts generated with exits and without; or
    "references", the decrease of ROUGE-L against the references compared with the texts without exits, at
    least 0. thresholds: those to test, from the most conservative on.
    """

    risk: Annotated[float, Interval(gt=0, lt=1), Wording("a probability")] = 0.05
    confidence: Annotated[float, Interval(gt=0, lt=1), Wording("a probability")] = 0.95
    measure: Literal["consistency", "references"] = "consistency"
    thresholds: tuple[UnitFloat, ...] = tuple(round(1 - step / 20, 2) for step in range(1, 20))

    def __post_init__(self) -> None:
        if not self.thresholds or list(self.thresholds) != sorted(set(self.thresholds), reverse=True):
            raise InputError(f"thresholds: expected falling numbers, got {list(self.thresholds)}")

    @property
    def least_texts(self) -> int:
        """Return the least number of texts that can show the risk: without any loss p = (1 - risk)^n."""
        return math.ceil(math.log(1 - self.confidence) / math.log(1 - self.risk))


def hoeffding_bentkus(losses: Sequence[float], delta: float) -> float:
    """Return the p-value of "the expected loss is more than `delta`", for losses in [0, 1]."""
    count = len(losses)
    mean = min(math.fsum(losses) / count, delta)
    exponent = -count * _relative_entropy(mean, delta)
    return min(1.0, math.exp(exponent), bentkus(losses, delta))


def bentkus(losses: Sequence[float], delta: float) -> float:
    """Return e P(Binomial(n, delta) <= ceil(sum of the losses))."""
    total = math.ceil(round(math.fsum(losses), 9))  # removes rounding errors before ceil
    return min(1.0, math.e * float(binom.cdf(total, len(losses), delta)))


def _relative_entropy(a: float, b: float) -> float:
    """Return h(a, b), the relative entropy of two Bernoulli variables."""
    first = 0.0 if a == 0 else a * math.log(a / b)
    second = 0.0 if a == 1 else (1 - a) * math.log((1 - a) / (1 - b))
    return first + second


def lowest_valid(
    measured: Iterable[tuple[float, Sequence[float]]], risk: float, confidence: float
) -> float | None:
    """Return the last threshold before the first failure; None if the first threshold fails.

    measured: decreasing thresholds, each with its losses; read until the first failure.
    """
    best = None
    for threshold, losses in measured:
        if hoeffding_bentkus(losses, risk) > 1 - confidence:
            return best
        best = threshold
    return best


ROWS = 16  # prompts per batch

Write = Callable[[Transformer], list[str]]
"""A function that generates texts with a model, in a fixed order."""


@dataclasses.dataclass(frozen=True)
class GeneratedTexts:
    """Generated texts, one per prompt or source."""

    texts: list[str]
    layers: float  # mean number of decoder layers per generated token
    seconds: float  # total time


def generate_texts(
    model: Transformer, write: Write, threshold: float | Sequence[float] | None
) -> GeneratedTexts:
    """Generate with exits at `threshold` (a number, or a number per exit), or without exits if it is None."""
    set_threshold(model, 1.0 if threshold is None else threshold)
    start = time.perf_counter()
    with full_depth(threshold is None), recorded_depths() as depths:
        texts = write(model)
    seconds = time.perf_counter() - start
    steps = [depth for depth in depths if depth.shape[1] == 1]  # longer steps read a prompt
    layers = torch.cat([depth.flatten() for depth in steps]).double().mean() if steps else torch.tensor(0.0)
    return GeneratedTexts(texts, float(layers), seconds)


def continuation_generator(
    rows: Sequence[Sequence[int]], prompt: int, decode: Decode
) -> tuple[Write, list[str]]:
    """Return a function that continues the first `prompt` tokens of each row, and the true continuations."""
    settings = GenerationConfig(max_new_tokens=len(rows[0]) - prompt)

    def write(model: Transformer) -> list[str]:
        device, texts = next(model.parameters()).device, list[str]()
        for start in range(0, len(rows), ROWS):
            ids = torch.tensor([row[:prompt] for row in rows[start : start + ROWS]], device=device)
            texts += model.generate(ids, None, settings).texts(decode)
        return texts

    return write, [ContinuedText(decode, row[:prompt])(row[prompt:]) for row in rows]


class Translator(Protocol):
    """A task or a checkpoint that translates."""

    def translate(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """Return the translation of each text."""
        ...


def translation_generator(translator: Translator, sources: Sequence[str]) -> Write:
    """Return a function that translates all `sources`."""
    return lambda model: translator.translate(model, sources)


class RougeL:
    """ROUGE-L of two texts: F1 of their longest common subsequence of words (Lin 2004)."""

    def __init__(self) -> None:
        self.scorer = scorer("rougeL")

    def __call__(self, target: str, text: str) -> float:
        """Return ROUGE-L from 0 to 1; 1 if neither text has a word."""
        if not RougeTokenizer().tokenize(target) and not RougeTokenizer().tokenize(text):
            return 1.0
        return self.scorer.score(target, text)["rougeL"].fmeasure


@dataclasses.dataclass(frozen=True)
class ThresholdTest:
    """The result of one threshold."""

    threshold: float
    losses: list[float]  # of all texts
    p_value: float
    layers: float  # per token
    speed: float  # generation time without exits, divided by the time with exits

    @property
    def risk(self) -> float:
        """Return the mean loss."""
        return math.fsum(self.losses) / len(self.losses)


@dataclasses.dataclass(frozen=True)
class CalibrationResult:
    """A result. threshold: the lowest that passed, or None. tested: thresholds up to the first failure."""

    threshold: float | None
    tested: list[ThresholdTest]


def calibrate(
    model: Transformer,
    write: Write,
    references: Sequence[str],
    config: CalibrateConfig,
    show: Callable[[ThresholdTest], None] = lambda tested: None,
) -> CalibrationResult:
    """Test thresholds on the texts that `write` generates, and set the lowest that passed.

    It is set in the model and in its configuration; if none passed, the model keeps its threshold. Raises
    `InputError` for a model without exits and for too few texts to show anything.
    """
    exits = exits_of(model)
    check_texts(len(references), config)
    before = list(exits.threshold) if isinstance(exits.threshold, tuple) else exits.threshold
    tested: list[ThresholdTest] = []

    def measured() -> Iterator[tuple[float, list[float]]]:
        for test in _tests(model, write, references, config):
            tested.append(test)
            show(test)
            yield test.threshold, test.losses

    try:
        best = lowest_valid(measured(), config.risk, config.confidence)
    finally:
        set_threshold(model, before)
    if best is not None:
        layers = next(test.layers for test in tested if test.threshold == best)
        set_threshold(model, best)
        model.config = with_guarantee(model.config, best, config, len(references), layers)
    return CalibrationResult(best, tested)


def _tests(
    model: Transformer,
    write: Write,
    references: Sequence[str],
    config: CalibrateConfig,
) -> Iterator[ThresholdTest]:
    """Test each threshold in turn.

    The first generation includes warm-up time, which lowers the measured speed of the first threshold instead
    of the full model's.
    """
    first = config.thresholds[0]
    warm_up = generate_texts(model, write, first)
    full_depth = generate_texts(model, write, None)
    for threshold in config.thresholds:
        early_exit = warm_up if threshold == first else generate_texts(model, write, threshold)
        losses = list(_losses(config.measure, full_depth, early_exit, references))
        p_value = hoeffding_bentkus(losses, config.risk)
        yield ThresholdTest(
            threshold, losses, p_value, early_exit.layers, full_depth.seconds / early_exit.seconds
        )


def _losses(
    measure: str, full_depth: GeneratedTexts, early_exit: GeneratedTexts, references: Sequence[str]
) -> Iterator[float]:
    similarity = RougeL()
    for full, text, reference in zip(full_depth.texts, early_exit.texts, references, strict=True):
        if measure == "consistency":
            yield 1 - similarity(full, text)
        else:
            yield max(0.0, similarity(reference, full) - similarity(reference, text))


def exits_of(model: Transformer) -> ExitsConfig:
    """Return the exits of the model's decoder; raises `InputError` if it has none."""
    depth = None if model.config.decoder is None else model.config.decoder.depth
    if not isinstance(depth, ExitsConfig):
        raise InputError(
            "calibrate: this model has no early exits; add exits with `polyformer convert --depth "
            "'exits(alone=true)'` and a short training, or train a model with --model.decoder.depth exits"
        )
    return depth


def check_texts(count: int, config: CalibrateConfig) -> None:
    """Raise `InputError` if there are too few texts to show the risk even without any loss."""
    if count < config.least_texts:
        raise InputError(
            f"texts: {count} cannot show a risk of {config.risk} with confidence {config.confidence}; "
            f"expected {config.least_texts} or more, or a greater risk"
        )


def with_guarantee(
    config: ModelConfig, threshold: float, asked: CalibrateConfig, texts: int, layers: float
) -> ModelConfig:
    """Return `config` with the threshold and its guarantee."""
    assert config.decoder is not None
    depth = config.decoder.depth
    assert isinstance(depth, ExitsConfig)
    guarantee = CalibrationConfig(
        risk=asked.risk,
        confidence=asked.confidence,
        measure=asked.measure,
        texts=texts,
        layers=round(layers, 2),
    )
    depth = dataclasses.replace(depth, threshold=threshold, calibration=guarantee)
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, depth=depth))
