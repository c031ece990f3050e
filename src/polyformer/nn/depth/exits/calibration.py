"""The record of the calibration of a threshold."""

import dataclasses

from polyformer.core.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Config):
    """The guarantee of a threshold: with probability `confidence` over the calibration texts, the expected
    loss of quality is at most `risk`.

    measure: of the quality. texts: number of calibration texts. layers: mean number of layers of a token with
    this threshold.
    """

    risk: float
    confidence: float
    measure: str
    texts: int
    layers: float
