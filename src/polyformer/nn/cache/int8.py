"""Int8: keep all keys and values, as integers of 8 bits with a scale for each token and head.

    scale = max_d |x_d| / 127,    x_d = scale * round(x_d / scale)

Attention is the attention of an ordinary cache over these rounded keys and values, also for the tokens of the
prompt. Token-wise quantization of Yao et al. 2022 (ZeroQuant), section 4.1, for keys after positions.

Costs (D + 4) / 4 D of the bytes of float32: 0.27 with D = 64. A single query on a CPU reads the integers;
other calls dequantize all keys first.
"""

import dataclasses
from typing import ClassVar

from polyformer.core.kv_cache import Int8Cache
from polyformer.nn.cache.base import CachePolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Policy(CachePolicy):
    """Keep all keys and values as 8-bit integers, with a scale for each token and head."""

    kind: ClassVar[str] = "int8"
    paper: ClassVar[str] = "Yao et al. 2022 (ZeroQuant), section 4.1"

    def new_state(self, reserve: int) -> Int8Cache:
        return Int8Cache.empty(reserve)
