"""Published faults as small modules that read vectors [B, T, WIDTH], and without it if `right`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu, one_hot, pad, scaled_dot_product_attention

WIDTH = 8


class Faulty(nn.Module):
    """The projections that the modules share, and whether the module is `right`."""

    def __init__(self, right: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.right = nn.Linear(WIDTH, 3 * WIDTH), right

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        return self.qkv(x).chunk(3, -1)


class PackedLinearAttention(Faulty):
    """The sums of the past continue in the next document.

    https://github.com/THUDM/slime/pull/1686
    """

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Apply causal linear attention."""
        q, k, v = self.project(x)
        scores = ((elu(q) + 1) @ (elu(k) + 1).mT).tril()
        if self.right and document_ids is not None:
            scores = scores * (document_ids.unsqueeze(1) == document_ids.unsqueeze(2))
        return scores @ v / scores.sum(-1, keepdim=True)


class ChunkedWindow(Faulty):
    """A window of 4 tokens; every query of a chunk sees all keys in the cache.

    https://github.com/pytorch/executorch/pull/21857
    """

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Apply attention; the state has the latest keys and values."""
        q, k, v = self.project(x)
        past = 0 if state is None else state[0].shape[1]
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        distance = past + torch.arange(x.shape[1]).unsqueeze(1) - torch.arange(k.shape[1])
        mask = (distance >= 0) & (distance < 4)
        if not self.right:
            mask[:, :past] = True
        return scaled_dot_product_attention(q, k, v, attn_mask=mask), (k[:, -3:], v[:, -3:])


class UnmaskedConvolution(Faulty):
    """A causal convolution reads the vectors at padding.

    https://github.com/huggingface/transformers/issues/31540
    """

    def __init__(self, right: bool = False):
        super().__init__(right)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Apply the convolution."""
        if self.right and attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        return self.convolution(pad(x.mT, (2, 0))).mT


class IgnoredNumberOfLabels(nn.Module):
    """A loss that accepts the number of labels of the whole batch, and divides by the number in its own rows.

    https://github.com/linkedin/Liger-Kernel/issues/802
    """

    def __init__(self, right: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.right = nn.Embedding(16, 16), right

    def forward(self, x: Tensor, labels: Tensor | None = None, num_items_in_batch: Any = None) -> Tensor:
        """Return the logits, or the loss."""
        logits = self.tokens(x)
        if labels is None:
            return logits
        total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = num_items_in_batch if self.right else (labels != -100).sum()
        return total / count


class RotaryUnderPadding(Faulty):
    """Rotary positions count padding in the first call only.

    https://github.com/unslothai/unsloth/pull/4078
    """

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, state: Any = None) -> Any:
        """Apply rotated attention; the state has rotated keys, and values."""
        q, k, v = self.project(x)
        past = 0 if state is None else state[0].shape[1]
        mask = torch.ones(len(x), past + x.shape[1]) if attention_mask is None else attention_mask
        positions = mask.cumsum(1)[:, past:] - 1
        if not self.right and not past:
            positions = torch.arange(x.shape[1]).expand(len(x), -1)
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        causal = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(past)
        visible = causal & mask.bool().unsqueeze(1) | torch.eye(k.shape[1], dtype=torch.bool)[past:]
        return scaled_dot_product_attention(q, k, v, attn_mask=visible), (k, v)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate pairs of channels by the position."""
        angles = positions.unsqueeze(-1) * torch.tensor([1.0, 0.5, 0.2, 0.1])
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class CausalFromTheTopLeft(Faulty):
    """With fewer queries than keys, `is_causal` aligns the first query with the first key.

    https://github.com/pytorch/pytorch/issues/103082
    """

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Apply attention; the state has keys and values."""
        q, k, v = self.project(x)
        if state is not None:
            k, v = torch.cat([state[0], k], 1), torch.cat([state[1], v], 1)
        if self.right:
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
            return scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True), (k, v)


class ExpertCapacity(nn.Module):
    """Experts take the first tokens of the whole batch, up to a capacity; later tokens are dropped."""

    def __init__(self, right: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, 2)
        self.experts, self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), right

    def forward(self, x: Tensor) -> Tensor:
        """Add the chosen expert's output."""
        chosen = one_hot(self.router(x).argmax(-1), 2)
        used = chosen.cumsum(1) if self.right else chosen.flatten(0, 1).cumsum(0).view_as(chosen)
        gates = chosen * (used <= 6)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (outputs * gates.unsqueeze(2)).sum(-1)


class SharedCache(Faulty):
    """Reordering renames the rows of a buffer without copying, so beams of one parent write to one row.

    https://github.com/ggml-org/llama.cpp/issues/3802
    """

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Apply attention; the state has a buffer, the buffer's row of each row, and a length."""
        q, *new = self.project(x)
        buffer, rows, past = state or (x.new_zeros(2, len(x), 64, WIDTH), torch.arange(len(x)), 0)
        stop = past + x.shape[1]
        buffer[:, rows, past:stop] = torch.stack(new)
        k, v = buffer[:, rows, :stop]
        mask = torch.ones(x.shape[1], stop, dtype=torch.bool).tril(past)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask), (buffer, rows, stop)

    def reorder(self, state: Any, index: Tensor) -> Any:
        """Return the state of the rows `index`."""
        buffer, rows, stop = state
        return (
            (buffer[:, rows[index]], torch.arange(len(index)), stop)
            if self.right
            else (buffer, rows[index], stop)
        )
