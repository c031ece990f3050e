"""SnapKV: keep the keys that the end of the prompt attends to.

    s_j = pool(sum over the last `window` queries i of softmax(q_i k^T scale)_j)

Each key head keeps the last `window` keys, and of the others the `budget - window` keys with the highest s_j,
summed over the query heads that share it. The pooling over `kernel` neighbours keeps the words around a key
too: the prompt attends to the first digit of a number, and only the answer to the others, so half a kernel
must cover what is copied. Keys of new tokens are all kept. Li et al. 2024 (SnapKV), section 4.

Costs `window` rows of attention weights per layer, once.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt
from polyformer.nn.cache.base import CacheCall, DroppingPolicy, among_last


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapKV(DroppingPolicy):
    """Keep the keys of the prompt that its last tokens attend to.

    `window`: the number of these tokens. `kernel`, `pooling`: of the weights along the text; an odd number.
    """

    window: PositiveInt = 32
    kernel: Annotated[int, Ge(1)] = 15
    pooling: Literal["mean", "max"] = "mean"

    kind: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "Li et al. 2024 (SnapKV), section 4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise InputError(f"kernel: expected an odd number, got {self.kernel}")

    @classmethod
    def examples(cls) -> tuple["SnapKV", ...]:
        return cls(budget=8, window=3, kernel=3), cls(budget=8, window=2, kernel=5, pooling="max")

    def scores(self, call: CacheCall, past: Tensor | None) -> Tensor:
        """Return the pooled weights from the last queries of the prompt."""
        weights = call.weights_received(self.window)
        # The weights of the window itself do not enter its neighbours' mean.
        weights = weights.masked_fill(self._window(call), 0.0)
        pool = F.avg_pool1d if self.pooling == "mean" else F.max_pool1d
        return pool(weights, self.kernel, stride=1, padding=self.kernel // 2)

    def _window(self, call: CacheCall) -> Tensor:
        """Return which keys are of the last `window` tokens of their row, [B or 1, 1, Tk]."""
        valid, keys = call.context.kv_valid, call.keys
        if valid is not None:
            return among_last(valid, self.window).unsqueeze(1)
        slots = torch.arange(keys.shape[2], device=keys.device)
        return (slots >= len(slots) - self.window).view(1, 1, -1)

    def always(self) -> tuple[int, int]:
        """Return the window."""
        return 0, self.window
