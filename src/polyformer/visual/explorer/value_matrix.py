"""The attention matrix of any mechanism: what takes values to outputs.

    y = A v + c,  c = f(q, k, 0),  so  f(q, k, I) - c = A

for every mechanism is affine in its values, whatever it makes of queries and keys: hashing, clusters, random
features, compressed keys. The columns of the identity are read D at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Mix = Callable[[Tensor], Tensor]
"""Values [1, Hkv, Tk, D] to outputs [1, H, Tq, D]."""


@torch.no_grad()
def value_matrix(mix: Mix, values: Tensor) -> Tensor:
    """A [H, Tq, Tk], float32; `values` [1, Hkv, Tk, D] say shape and type."""
    length, width = values.shape[-2:]
    nothing = mix(torch.zeros_like(values))
    columns = []
    for start in range(0, length, width):
        part = torch.zeros_like(values)
        index = torch.arange(start, min(start + width, length), device=values.device)
        part[..., index, index - start] = 1
        columns.append((mix(part) - nothing)[0, ..., : len(index)])
    return torch.cat(columns, -1).float()
