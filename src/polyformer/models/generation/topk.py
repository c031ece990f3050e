"""The largest of very many numbers, searched in blocks, as `topk` and `argmax` are slow for large inputs."""

import torch
from torch import Tensor

# The size of a block, which has a fast maximum; and the least input length for which blocks pay off.
BLOCK, MIN_LENGTH = 128, 1 << 13


def blockwise_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest of each row of x [N, M], in order, and their indices: [N, count] each."""
    length = x.shape[1]
    blocks = length // BLOCK
    if length < MIN_LENGTH or blocks < count:
        values, index = x.topk(count)
        return values, index
    whole = x[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    # The blocks with the largest maxima contain all of them; ascending, so that ties keep their order.
    chosen = whole.amax(2).topk(count).indices.sort().values
    some = whole.gather(1, chosen.unsqueeze(2).expand(-1, -1, BLOCK)).flatten(1)
    rest = x[:, blocks * BLOCK :]
    values, index = torch.cat([some, rest], 1).topk(count)
    inside = chosen.gather(1, (index // BLOCK).clamp_max(count - 1)) * BLOCK + index % BLOCK
    return values, torch.where(index < some.shape[1], inside, index - some.shape[1] + blocks * BLOCK)


def blockwise_argmax(logits: Tensor) -> Tensor:
    """Return the first token with the highest logit, [N] for [N, V]."""
    if logits.is_cpu and logits.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(logits.numpy().argmax(-1))  # 15 times as fast as torch's argmax
    length = logits.shape[1]
    blocks = length // BLOCK
    if length < MIN_LENGTH:
        return logits.argmax(-1)
    peaks = logits[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(2)
    rest = logits[:, blocks * BLOCK :]
    if rest.shape[1]:
        peaks = torch.cat([peaks, rest.amax(1, keepdim=True)], 1)
    first = peaks.argmax(1, keepdim=True) * BLOCK
    inside = (first + torch.arange(BLOCK, device=logits.device)).clamp_max(length - 1)
    return first.squeeze(1) + logits.gather(1, inside).argmax(1)
