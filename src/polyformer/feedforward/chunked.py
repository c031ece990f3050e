"""A feed-forward in chunks of tokens: the same numbers, with the inner activations of one chunk at a time.

    y = concat(f(x_1), f(x_2), ..)        x_i: `chunk` tokens each

Training keeps no inner activations: each chunk is computed again in the backward pass. Memory: chunk * F in
place of B T F numbers, F the intermediate size; one more forward pass of f. Kitaev et al. 2020 (Reformer),
section 3, where the reversible layers compute it again anyway.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.utils.checkpoint
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.feedforward.base import FeedForward, FeedForwardConfig
from polyformer.sequence.context import Context


def dense() -> FeedForwardConfig:
    """What is cut in chunks by default."""
    return FeedForwardConfig.from_dict("dense")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedConfig(FeedForwardConfig):
    """`inner`: any feed-forward that looks at one token at a time."""

    inner: FeedForwardConfig = dataclasses.field(default_factory=dense)
    chunk: int = 512  # tokens, of all rows together

    kind: ClassVar[str] = "chunked"
    paper: ClassVar[str] = "Kitaev et al. 2020 (Reformer), section 3"

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise InputError(f"chunk: counts tokens, expected 1 or more, got {self.chunk}")
        if not self.inner.tokenwise:
            raise InputError(
                f"inner: {quote(self.inner.kind)} looks at more than one token; "
                "put 'chunked' inside it instead"
            )

    def build(self, hidden_size: int) -> "Chunked":
        """The inner module, in chunks."""
        return Chunked(self.inner.build(hidden_size), self.chunk)

    def at(self, layer: int) -> "ChunkedConfig":
        """In chunks, what layer `layer` has inside."""
        return dataclasses.replace(self, inner=self.inner.at(layer))

    @classmethod
    def examples(cls) -> tuple["ChunkedConfig", ...]:
        """Many chunks, and a chunk longer than the input."""
        return cls(chunk=4), cls(inner=FeedForwardConfig.from_dict("gated"), chunk=1000)


class Chunked(FeedForward):
    """x [..., E] -> [..., E]."""

    def __init__(self, inner: FeedForward, chunk: int):
        super().__init__()
        self.inner, self.chunk = inner, chunk

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """concat(f(x_1), f(x_2), ..), x_i of `chunk` tokens each."""
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) <= self.chunk:
            return self._one(rows).view(x.shape)
        return torch.cat([self._one(part) for part in rows.split(self.chunk)]).view(x.shape)

    def _one(self, rows: Tensor) -> Tensor:
        """Tokens [N, E] of one chunk."""
        if self.training and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(self.inner, rows, use_reentrant=False)
        return self.inner(rows)
