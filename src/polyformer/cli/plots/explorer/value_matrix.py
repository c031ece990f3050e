"""The attention matrix of any mechanism: the linear map from values to outputs.

    y = A v + c,  c = f(q, k, 0),  so  f(q, k, I) - c = A

for every mechanism is affine in its values, for any function of queries and keys: hashing, clusters, random
features, compressed keys. The columns of the identity are evaluated in groups of D.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Mix = Callable[[Tensor], Tensor]
"""A function from values [1, Hkv, Tk, D] to outputs [1, H, Tq, D]."""


@torch.no_grad()
def value_matrix(mix: Mix, values: Tensor) -> Tensor:
    """Return A [H, Tq, Tk], float32; `values` [1, Hkv, Tk, D] determine shape and type."""
    length, width = values.shape[-2:]
    nothing = mix(torch.zeros_like(values))
    columns = []
    for start in range(0, length, width):
        part = torch.zeros_like(values)
        index = torch.arange(start, min(start + width, length), device=values.device)
        part[..., index, index - start] = 1
        columns.append((mix(part) - nothing)[0, ..., : len(index)])
    return torch.cat(columns, -1).float()
