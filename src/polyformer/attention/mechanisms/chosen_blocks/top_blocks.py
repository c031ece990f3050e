"""Blocks chosen by content, for checkpoints that were trained with dense attention.

    b_i = the first blocks, the last `local` blocks, and of the others the best by q_i . mean_(j in b) k_j

`keep` counts all blocks of a query. Up to `keep` blocks of text attention is dense, so short texts do not
change. The choice resembles the estimates of MInference (Jiang et al. 2024) and XAttention (Xu et al. 2025),
but is made for each query and not for blocks of queries: it then depends on no later query, and decoding with
a cache equals a single pass.
"""

import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms.chosen_blocks.base import ChosenBlocksConfig
from polyformer.attention.mechanisms.chosen_blocks.choice import Ranking
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopBlocksConfig(ChosenBlocksConfig):
    """Attention over the best blocks of keys, without training: first, local and chosen blocks.

    Raises `InputError` if `keep` is less than `first` and `local` together.
    """

    block_size: PositiveInt = 64
    keep: PositiveInt = 24  # blocks that a query sees
    first: NonNegativeInt = 1  # of them the first of the document
    local: PositiveInt = 4  # of them the latest, with the query's own

    kind: ClassVar[str] = "top_blocks"
    paper: ClassVar[str] = "Jiang et al. 2024 (MInference), section 3"

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.first + self.local
        if self.keep < least:
            raise InputError(
                f"keep: expected at least first + local = {least} blocks, got {self.keep}; "
                "use a larger keep or a smaller local"
            )

    def ranking(self) -> Ranking:
        """Return the rule with keep - first - local ranked blocks."""
        return Ranking(self.block_size, self.first, self.local, self.keep - self.first - self.local)

    @classmethod
    def examples(cls) -> tuple["TopBlocksConfig", ...]:
        """Return configs of a few tokens per block, with and without first blocks."""
        return cls(block_size=2, keep=3, local=1), cls(block_size=1, keep=4, first=0, local=2)
