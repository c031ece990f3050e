"""A feed-forward in chunks of tokens: the same result with the inner activations of a single chunk in memory.

    y = concat(f(x_1), f(x_2), ..)        x_i: `chunk` tokens each

Training stores no inner activations: each chunk is recomputed in the backward pass (activation
checkpointing). The memory is chunk * F instead of B T F numbers, F the intermediate size, for an extra
forward pass of f. Kitaev et al. 2020 (Reformer), section 3; the reversible layers there recompute f anyway.
"""

import dataclasses
from functools import partial
from typing import ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.nn.feedforward.base import FeedForward, FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedConfig(FeedForwardConfig):
    """Chunked feed-forward: tokens are processed in chunks, which saves memory in training.

    `inner`: any feed-forward that processes each token separately.
    """

    inner: FeedForwardConfig = dataclasses.field(
        default_factory=partial(FeedForwardConfig.from_dict, "dense")
    )
    chunk: PositiveInt = 512  # tokens, counted over all rows of the batch

    kind: ClassVar[str] = "chunked"
    paper: ClassVar[str] = "Kitaev et al. 2020 (Reformer), section 3"

    def __post_init__(self) -> None:
        if not self.inner.tokenwise:
            raise InputError(
                f"inner: {quote(self.inner.kind)} reads more than one token; put 'chunked' inside it instead"
            )

    def build(self, hidden_size: int) -> "Chunked":
        """Return the inner module, applied in chunks."""
        return Chunked(self.inner.build(hidden_size), self.chunk)

    def for_layer(self, layer: int) -> "ChunkedConfig":
        """Return the configuration with the inner feed-forward of layer `layer`."""
        return dataclasses.replace(self, inner=self.inner.for_layer(layer))

    @classmethod
    def examples(cls) -> tuple["ChunkedConfig", ...]:
        return cls(chunk=4), cls(inner=FeedForwardConfig.from_dict("gated"), chunk=1000)


class Chunked(FeedForward):
    """A module that maps x [..., E] to [..., E] chunk by chunk."""

    def __init__(self, inner: FeedForward, chunk: int):
        super().__init__()
        self.inner, self.chunk = inner, chunk

    def widen(self) -> None:
        """Return float32 for x in float16, if the inner module can."""
        self.inner.widen()

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return concat(f(x_1), f(x_2), ..), where each x_i has `chunk` tokens."""
        # [B T, E]: tokens are independent, so that chunks may cross rows.
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= self.chunk:
            return self._run_chunk(rows).view(x.shape)
        return torch.cat([self._run_chunk(part) for part in rows.split(self.chunk)]).view(x.shape)

    def _run_chunk(self, rows: Tensor) -> Tensor:
        """Return f of the tokens [N, E] of a chunk."""
        # Without checkpointing, the graph would keep the inner activations of all chunks.
        if self.training and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.inner, rows, use_reentrant=False)
        return self.inner(rows)
