"""The delta rule: a token replaces the value that the state holds for its key.

    S_t = S_(t-1) - b_t k_t (S_(t-1)^T k_t - v_t)^T        y_t = S_t^T q_t / sqrt(D)
    q, k = unit(q), unit(k)        b_t = sigmoid(x_t . w)        output = RMSNorm(y)

x is the input of the layer. With b_t = 1 the state returns exactly v_t for k_t. q, k and v pass a short
convolution first. b_t up to 2 (`reflect`) lets the state turn a direction around, which tracking a parity
needs. Schlag et al. 2021, section 4.2; Yang et al. 2024 (DeltaNet), sections 3.1 and 3.3; Grazzi et
al. 2025 for `reflect`.
"""

import dataclasses
from typing import ClassVar

from torch import Tensor

from polyformer.attention.mechanisms.recurrence.base import Recurrence, RecurrenceConfig, unit
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrenceConfig):
    """DeltaNet: the value of a key is replaced instead of added to.

    `reflect`: b from 0 to 2 instead of 0 to 1.
    """

    short_convolution: PositiveInt | None = 4
    reflect: bool = False

    kind: ClassVar[str] = "delta"
    paper: ClassVar[str] = "Yang et al. 2024 (DeltaNet), section 3"
    gates: ClassVar[tuple[str, ...]] = ("erase",)

    def build(self, num_heads: int, head_size: int) -> "Delta":
        """Return the module with short convolutions and an output norm."""
        return Delta(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["DeltaConfig", ...]:
        """Return the default, and a config with reflections and without convolutions."""
        return cls(), cls(reflect=True, short_convolution=None)


class Delta(Recurrence):
    """The scan of b v for unit keys, with the gate b."""

    config: DeltaConfig

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> ScanInputs:
        """Return unit queries and keys and b v."""
        erase = self.per_head(gates["erase"]).sigmoid() * (2 if self.config.reflect else 1)
        q, k = (unit(x) for x in (q, k))
        return ScanInputs(q * self.key_size**-0.5, k, v * erase, erase=erase)
