"""Fixed depth: every token goes through every layer. Vaswani et al. 2017."""

import dataclasses
from typing import ClassVar

from polyformer.attention.positions import Shape
from polyformer.core.ops.norms import NormConfig
from polyformer.nn.depth.base import DepthConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedConfig(DepthConfig):
    """Fixed depth: every token goes through every layer."""

    kind: ClassVar[str] = "fixed"

    def build(self, shape: Shape, norm: NormConfig | None) -> None:
        """Return None."""
        return
