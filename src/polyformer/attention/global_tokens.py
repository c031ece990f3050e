"""Global tokens: the first few see everything and are seen by everything."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.context import Context
from polyformer.core.errors import InputError
from polyformer.core.layout import Keys, unite
from polyformer.core.pattern import Pattern
from polyformer.core.patterns import runs


@dataclasses.dataclass(frozen=True)
class Global(Pattern):
    """The first `tokens` positions of each document see all keys and are seen by all queries.

    Counted in positions, so left padding and packed documents change nothing.
    """

    tokens: int = 1

    row: ClassVar[str] = "S8"
    paper: ClassVar[str] = "Beltagy et al. 2020 (Longformer), section 3.1"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"Global: expected 1 token or more, got {self.tokens}")

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q, k = context.query_position(b, q_idx), context.key_position(b, kv_idx)
        return (q < self.tokens) | (k < self.tokens)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        if torch.compiler.is_compiling() and (context.q_pos is not None or context.kv_pos is not None):
            return super().keys(context, start, stop)  # a tensor cannot be read while a graph is traced
        everything = ((0, context.kv_len),)
        queries = self._first(context, "q")
        inside = sum(max(0, min(b, stop) - max(a, start)) for a, b in queries["some"])
        whole = any(a <= start and stop <= b for a, b in queries["full"])
        keys = self._first(context, "kv")
        return Keys(everything if inside else keys["some"], everything if whole else keys["full"])

    def cuts(self, context: Context) -> tuple[int, ...]:
        if torch.compiler.is_compiling() and context.q_pos is not None:
            return ()
        return tuple(edge for run in self._first(context, "q")["some"] for edge in run)

    def _first(self, context: Context, side: str) -> dict[str, tuple[tuple[int, int], ...]]:
        """The runs of query or key indices that are global in some and in all batch rows."""

        def make() -> dict[str, tuple[tuple[int, int], ...]]:
            positions = context.q_pos if side == "q" else context.kv_pos
            if positions is None:
                shift, length = (context.offset, context.q_len) if side == "q" else (0, context.kv_len)
                run = unite(((0, min(self.tokens - shift, length)),))
                return {"some": run, "full": run}
            first = (positions if positions.dim() == 2 else positions[None]).cpu() < self.tokens
            return {"some": runs(first.any(0)), "full": runs(first.all(0))}

        return context.once((self, side), make)
