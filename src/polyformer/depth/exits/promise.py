"""What is kept of the calibration of a threshold."""

import dataclasses

from polyformer.core.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Config):
    """What a threshold promises: with probability `confidence` over the texts that it was found with, the
    expected loss of quality is at most `risk`.

    measure: of what. texts: how many it was found with. layers: how many layers a token then took on average.
    """

    risk: float
    confidence: float
    measure: str
    texts: int
    layers: float
