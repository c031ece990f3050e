"""Calibration of an exit threshold on texts; the guarantee is saved in the model's configuration."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from polyformer.applications.exits.config import CalibrateConfig
from polyformer.applications.exits.learn_then_test import hoeffding_bentkus, lowest_valid
from polyformer.applications.exits.texts import GeneratedTexts, RougeL, Write, generate_texts
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.depth.exits import CalibrationConfig, ExitsConfig, set_threshold


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
