"""Calibration of an exit threshold on texts; the guarantee is saved in the model's configuration."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from polyformer.applications.exits.config import CalibrateConfig
from polyformer.applications.exits.learn_then_test import hoeffding_bentkus, lowest_valid
from polyformer.applications.exits.similarity import RougeL
from polyformer.applications.exits.texts import Write, Written, written
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.depth.exits import CalibrationConfig, ExitsConfig, set_threshold


@dataclasses.dataclass(frozen=True)
class Tested:
    """The result of one threshold.

    losses: of all texts. p_value: of these losses. layers: per token. speed: generation time without exits
    divided by the time with exits, over all texts.
    """

    threshold: float
    losses: list[float]
    p_value: float
    layers: float
    speed: float

    @property
    def risk(self) -> float:
        """Return the mean loss."""
        return math.fsum(self.losses) / len(self.losses)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A result. threshold: the lowest that passed, or None. tested: thresholds up to the first failure."""

    threshold: float | None
    tested: list[Tested]


def calibrate(
    model: Transformer,
    write: Write,
    references: Sequence[str],
    config: CalibrateConfig,
    show: Callable[[Tested], None] = lambda tested: None,
) -> Calibrated:
    """Test thresholds on the texts that `write` generates, and set the lowest that passed.

    It is set in the model and in its configuration; if none passed, the model keeps its threshold. Raises
    `InputError` for a model without exits and for too few texts to show anything.
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
    """Test each threshold in turn.

    The first generation includes warm-up time, which lowers the measured speed of the first threshold instead
    of the full model's.
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
    """Return the exits of the model's decoder; raises `InputError` if it has none."""
    depth = None if model.config.decoder is None else model.config.decoder.depth
    if not isinstance(depth, ExitsConfig):
        raise InputError(
            "calibrate: this model has no early exits; add some by `polyformer convert --depth "
            "'exits(alone=true)'` and train it a little, or train one with --model.decoder.depth exits"
        )
    return depth


def check_texts(count: int, config: CalibrateConfig) -> None:
    """Raise `InputError` if there are too few texts to show the risk even without any loss."""
    if count < config.least_texts:
        raise InputError(
            f"texts: {count} cannot show a risk of {config.risk} with confidence {config.confidence}; "
            f"expected {config.least_texts} or more, or a greater risk"
        )


def promised(
    config: ModelConfig, threshold: float, asked: CalibrateConfig, texts: int, layers: float
) -> ModelConfig:
    """Return `config` with the threshold and its guarantee."""
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
