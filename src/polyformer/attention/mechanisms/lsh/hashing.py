"""The hash of LSH attention: h(x) = argmax [x R; -x R], with a matrix R [D, buckets / 2] per round."""

import torch
from torch import Tensor

from polyformer.core.ops.cache_capacity import cache_capacity
from polyformer.core.ops.linear import linear


@torch.no_grad()
def hash_keys(k: Tensor, directions: Tensor, rounds: int) -> Tensor:
    """Return the buckets [B, H, rounds, T] of keys [B, H, T, D]; directions [rounds * buckets / 2, D].

    Keys are projected in runs that fit into the caches of all threads.
    """
    half = len(directions) // rounds
    iota = torch.arange(half, dtype=directions.dtype, device=directions.device)
    buckets = []
    for rows in k.flatten(0, 2).split(max(1, torch.get_num_threads() * cache_capacity(k) // len(directions))):
        x = linear(rows, directions).unflatten(-1, (rounds, half))
        top, low = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
        # The index of the extreme; argmax is not vectorized on a CPU and far slower.
        where = x.eq_(torch.where(top < -low, low, top)).mul_(iota).amax(-1)
        buckets.append((where + half * (top < -low).squeeze(-1)).int())
    return torch.cat(buckets).view(*k.shape[:3], -1).transpose(2, 3)
