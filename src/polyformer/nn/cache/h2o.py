"""H2O: keep the keys with the largest sum of attention weights so far, and the latest keys.

    s_j = sum over all queries i so far of softmax(q_i k^T scale)_j

Each key head keeps its last budget - budget // 2 keys and, of the others, the budget // 2 with the highest
s_j ("heavy hitters"), summed over the query heads that share it. Keys are dropped after the prompt and after
every later call; a dropped key is not read again. Zhang et al. 2023 (H2O), section 4.

Costs a second computation of all attention weights: of the prompt in parts, later of one query per step.
Tokens that are read in a single call see each other's keys, so the split of a text into calls matters.
"""

import dataclasses
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from polyformer.nn.cache.base import CacheCall, DroppingPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(DroppingPolicy):
    """Keep the keys with the most attention so far, and the latest keys, half of the budget each."""

    kind: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "Zhang et al. 2023 (H2O), section 4"
    after_every_call: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> tuple["H2O", ...]:
        return (cls(budget=7),)

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the sums of all weights that the keys have received."""
        weights = call.weights_received()
        return weights if past is None else weights + F.pad(past, (0, weights.shape[-1] - past.shape[-1]))

    def always(self) -> tuple[int, int]:
        """Return the latest half."""
        return 0, self.budget - self.budget // 2
