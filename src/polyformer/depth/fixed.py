"""Fixed depth: every token goes through every layer. Vaswani et al. 2017."""

import dataclasses
from typing import ClassVar

from polyformer.depth.base import DepthConfig
from polyformer.ops.norms import NormConfig
from polyformer.position import Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedConfig(DepthConfig):
    """Fixed depth: every token goes through every layer."""

    kind: ClassVar[str] = "fixed"

    def build(self, shape: Shape, norm: NormConfig | None) -> None:
        """Return None."""
        return
