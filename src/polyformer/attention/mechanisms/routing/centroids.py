"""Spherical k-means with centroids that follow a moving average, a separate set per head.

    c(x) = argmax_c mu_c . n(x)        n(x) = LayerNorm(x), without scale and bias
    mu_c <- normalize(decay mu_c + (1 - decay) normalize(sum of the n(x) with c(x) = c))

A training step uses the current centroids and updates them after its backward pass: the tokens of a pass do
not decide their own clusters, and recomputed activations are the same. Evaluation never changes them. Sums
are all-reduced over all processes. A centroid that no vector chose does not move.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.cache_capacity import cache_capacity

LANES = 16
"""The number of centroids is padded to a multiple of this.

The widest vector registers in use have 16 numbers, and multiples of 16 also suit narrower registers. The
maximum of a row is computed four times as fast as its index, which is why `forward` computes the maximum
first and then the first entry that is equal.
"""

Chosen = tuple[Tensor, Tensor, Tensor | None]
"""Normed vectors [B, H, T, D], their clusters [B, H, T], and a mask of non-padding [B, T], None for all."""


def normed(x: Tensor) -> Tensor:
    """Return n(x): x [B, H, T, D] with mean 0 and length sqrt(D) over D."""
    # The memory layout of the projections, [B, T, H, D], which avoids copies.
    return F.layer_norm(x.transpose(1, 2), x.shape[-1:]).transpose(1, 2)


class Centroids(nn.Module):
    """mu [H, C, D]: random directions from a separate generator, seeded like the initial weights."""

    centres: Tensor

    def __init__(self, heads: int, count: int, width: int, decay: float):
        super().__init__()
        self.decay = decay
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = torch.randn(heads, count, width, generator=generator, dtype=torch.float64, device="cpu")
        centres = torch.empty(heads, count, width).copy_(
            F.normalize(drawn - drawn.mean(-1, keepdim=True), dim=-1)
        )
        self.register_buffer("centres", centres)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the number of the nearest centroid [B, H, T] for each vector of normed x [B, H, T, D]."""
        centres = self.centres.to(x.dtype)
        if x.is_cuda or x.shape[2] == 1:
            return (x @ centres.mT).argmax(-1)
        count = centres.shape[1]
        more = centres[:, :1].expand(-1, -count % LANES, -1)
        centres = torch.cat([centres, more], 1).mT.contiguous()  # [H, D, W]
        reversed_numbers, width = x.new_empty(x.shape[:3]), centres.shape[2]
        run = max(1, min(x.shape[2], cache_capacity(x) // width))
        scores, best = x.new_empty(2, run, width)
        # Descending numbers, so that the maximum over equal scores is the first index.
        down = torch.arange(width, 0, -1, dtype=x.dtype, device=x.device)
        for row, row_numbers in zip(x, reversed_numbers):
            for head, own, head_numbers in zip(row, centres, row_numbers):
                for vectors, numbers in zip(head.split(run), head_numbers.split(run)):
                    score = torch.mm(vectors, own, out=scores[: len(vectors)])
                    top = score.amax(-1, keepdim=True)
                    first = torch.eq(score, top, out=best[: len(vectors)]).mul_(down)
                    torch.amax(first, -1, out=numbers)
        numbers = width - reversed_numbers.long()
        return numbers.masked_fill_(numbers >= count, 0)  # a copy of centroid 0, or NaN

    def update_after_backward(self, queries: Chosen, keys: Chosen) -> None:
        """Move the centroids in training, once the gradient of the queries is computed."""
        if self.training and queries[0].requires_grad:
            chosen = [(x.detach(), clusters, real) for x, clusters, real in (queries, keys)]
            queries[0].register_hook(lambda _: self._update(chosen))

    @torch.no_grad()
    def _update(self, chosen: list[Chosen]) -> None:
        old = self.centres.to(torch.promote_types(self.centres.dtype, torch.float32))
        sums = torch.zeros_like(old)
        for vectors in chosen:
            self._add_to_sums(sums, *vectors)
        # All processes must move their centroids alike.
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        new = F.normalize(self.decay * old + (1 - self.decay) * F.normalize(sums, dim=-1), dim=-1)
        has_members = sums.square().sum(-1, keepdim=True) > 0
        self.centres.copy_(torch.where(has_members, new, old))

    def _add_to_sums(self, sums: Tensor, x: Tensor, clusters: Tensor, real: Tensor | None) -> None:
        """Add the vectors of each cluster to its sum [H, C, D]."""
        heads, count, _ = sums.shape
        if real is not None:
            x = x * real[:, None, :, None]
        place = clusters + count * torch.arange(heads, device=x.device).view(-1, 1)
        # The memory layout of x, [B, T, H, D], which avoids copies.
        place, x = place.transpose(1, 2).flatten(), x.transpose(1, 2).flatten(0, 2)
        sums.flatten(0, 1).index_add_(0, place, x.to(sums.dtype))
