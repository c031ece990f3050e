"""Options of the guarantee for a model with early exits, and of its test."""

import dataclasses
import math
from typing import Annotated, Literal

from annotated_types import Interval

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import UnitFloat, Wording


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
