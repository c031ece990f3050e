"""From texts to a threshold with a promise, which the model's configuration keeps."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from polyformer.architecture import ModelConfig
from polyformer.calibration.config import CalibrateConfig
from polyformer.calibration.learn_then_test import hoeffding_bentkus, lowest_valid
from polyformer.calibration.similarity import RougeL
from polyformer.calibration.texts import Write, Written, written
from polyformer.core.errors import InputError
from polyformer.depth.exits import CalibrationConfig, ExitsConfig, set_threshold
from polyformer.model import Transformer


@dataclasses.dataclass(frozen=True)
class Tested:
    """One threshold: the losses of all texts, their p-value, layers a token, and how many times as fast as
    without exits all texts were written."""

    threshold: float
    losses: list[float]
    p_value: float
    layers: float
    speed: float

    @property
    def risk(self) -> float:
        """The mean loss."""
        return math.fsum(self.losses) / len(self.losses)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """threshold: the lowest that passed, None where none did. tested: those up to the first that failed."""

    threshold: float | None
    tested: list[Tested]


def calibrate(
    model: Transformer,
    write: Write,
    references: Sequence[str],
    config: CalibrateConfig,
    show: Callable[[Tested], None] = lambda tested: None,
) -> Calibrated:
    """Test thresholds on what `write` writes; the model then has the lowest that passed, in its
    configuration too, or its own where none did.

    Raises `InputError` for a model without exits and for too few texts to show anything.
    """
    exits = exits_of(model)
    check_texts(len(references), config)
    before = list(exits.threshold) if isinstance(exits.threshold, tuple) else exits.threshold
    tested: list[Tested] = []

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
        model.config = promised(model.config, best, config, len(references), layers)
    return Calibrated(best, tested)


def _tests(
    model: Transformer,
    write: Write,
    references: Sequence[str],
    config: CalibrateConfig,
) -> Iterator[Tested]:
    """Each threshold in turn.

    What a first generation makes ready costs time, which the first threshold's speed bears, not the whole
    model's.
    """
    similarity, first = RougeL(), config.thresholds[0]
    warming = written(model, write, first)
    whole = written(model, write, None)
    for threshold in config.thresholds:
        early = warming if threshold == first else written(model, write, threshold)
        losses = list(_losses(config.measure, similarity, whole, early, references))
        p_value = hoeffding_bentkus(losses, config.risk)
        yield Tested(threshold, losses, p_value, early.layers, whole.seconds / early.seconds)


def _losses(
    measure: str, similarity: RougeL, whole: Written, early: Written, references: Sequence[str]
) -> Iterator[float]:
    for full, text, reference in zip(whole.texts, early.texts, references, strict=True):
        if measure == "consistency":
            yield 1 - similarity(full, text)
        else:
            yield max(0.0, similarity(reference, full) - similarity(reference, text))


def exits_of(model: Transformer) -> ExitsConfig:
    """The exits of its decoder; `InputError` where it has none."""
    depth = None if model.config.decoder is None else model.config.decoder.depth
    if not isinstance(depth, ExitsConfig):
        raise InputError(
            "calibrate: this model has no early exits; add some by `polyformer convert --depth "
            "'exits(alone=true)'` and train it a little, or train one with --model.decoder.depth exits"
        )
    return depth


def check_texts(count: int, config: CalibrateConfig) -> None:
    """Raises `InputError` for so few texts that even without any loss nothing is shown."""
    if count < config.least_texts:
        raise InputError(
            f"texts: {count} cannot show a risk of {config.risk} with confidence {config.confidence}; "
            f"expected {config.least_texts} or more, or a greater risk"
        )


def promised(
    config: ModelConfig, threshold: float, asked: CalibrateConfig, texts: int, layers: float
) -> ModelConfig:
    """`config` with the threshold and what it promises."""
    assert config.decoder is not None
    depth = config.decoder.depth
    assert isinstance(depth, ExitsConfig)
    promise = CalibrationConfig(
        risk=asked.risk,
        confidence=asked.confidence,
        measure=asked.measure,
        texts=texts,
        layers=round(layers, 2),
    )
    depth = dataclasses.replace(depth, threshold=threshold, calibration=promise)
    return dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, depth=depth))
