"""Mixture of block attention (MoBA): a query attends to its own block and to the best earlier blocks.

    b_i = own block of i, and the top_k - 1 blocks b before it with the greatest q_i . mean_(j in b) k_j

Own keys are masked causally. The choice has no gradient; the keys that were chosen have the gradients of
attention. In an encoder blocks after the own are ranked too. Lu et al. 2025, section 2.2.
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms.chosen_blocks.base import ChosenBlocksConfig
from polyformer.attention.mechanisms.chosen_blocks.choice import Ranking
from polyformer.core.ranges import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class MobaConfig(ChosenBlocksConfig):
    """Mixture of block attention: each query attends to the blocks with the best mean keys, and its own."""

    block_size: PositiveInt = 64
    top_k: PositiveInt = 3  # blocks that a query sees, with its own

    kind: ClassVar[str] = "moba"
    paper: ClassVar[str] = "Lu et al. 2025 (MoBA), section 2.2"

    def ranking(self) -> Ranking:
        """Return the rule with top_k - 1 ranked blocks."""
        return Ranking(self.block_size, 0, 1, self.top_k - 1)

    @classmethod
    def examples(cls) -> tuple["MobaConfig", ...]:
        """Return a config of a few tokens per block."""
        # With these sizes no choice of the contract tests is so close that rounding decides.
        return (cls(block_size=3, top_k=2),)
