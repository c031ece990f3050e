"""Options of the guarantee for a model with early exits, and of its test."""

import dataclasses
import math
from typing import Literal

from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Config):
    """A guarantee: with probability `confidence`, the expected loss of quality is at most `risk`.

    measure: "consistency", 1 minus ROUGE-L between the texts generated with exits and without; or
    "references", the decrease of ROUGE-L against the references compared with the texts without exits, at
    least 0. thresholds: those to test, from the most conservative on.
    """

    risk: float = 0.05
    confidence: float = 0.95
    measure: Literal["consistency", "references"] = "consistency"
    thresholds: tuple[float, ...] = tuple(round(1 - step / 20, 2) for step in range(1, 20))

    def __post_init__(self) -> None:
        for name in ("risk", "confidence"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise InputError(f"{name}: expected a probability between 0 and 1, got {getattr(self, name)}")
        if self.measure not in ("consistency", "references"):
            raise InputError(f"measure: expected 'consistency' or 'references', got {quote(self.measure)}")
        if not self.thresholds or not all(0.0 <= value <= 1.0 for value in self.thresholds):
            raise InputError(f"thresholds: expected confidences from 0 to 1, got {list(self.thresholds)}")
        if list(self.thresholds) != sorted(set(self.thresholds), reverse=True):
            raise InputError(f"thresholds: expected falling numbers, got {list(self.thresholds)}")

    @property
    def least_texts(self) -> int:
        """Return the least number of texts that can show the risk: without any loss p = (1 - risk)^n."""
        return math.ceil(math.log(1 - self.confidence) / math.log(1 - self.risk))
