"""Gradients into the tensors that a `score_mod` captures: bias tables, slopes, lookup tables.

A closure says nothing about what it reads. One tiny probe call under a `TorchFunctionMode` finds the
tensors that require a gradient; during a differentiated evaluation the same kind of mode watches them
being indexed, so that the gradient of `table[b, h, q_idx, bucket]` is added where it belongs in one running
total and no gradient of the table's full size is made per tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyformer.patterns.base import ScoreMod


def captured(score_mod: ScoreMod | None, like: Tensor) -> tuple[Tensor, ...]:
    """The tensors requiring a gradient that `score_mod` reads, found by calling it on one score."""
    if score_mod is None or not torch.is_grad_enabled():
        return ()
    zero = torch.zeros((), dtype=torch.long, device=like.device)
    score = torch.zeros(1, 1, 1, 1, dtype=like.dtype, device=like.device)
    with torch.no_grad(), _Finder() as finder:
        score_mod(score, zero.view(1, 1, 1, 1), zero.view(1, 1, 1, 1), zero.view(1, 1), zero.view(1))
    return tuple(finder.found.values())


class Evaluation:
    """`score_mod` on one tile of scores, with what is needed to differentiate it."""

    def __init__(
        self, score_mod: ScoreMod, tables: tuple[Tensor, ...], scores: Tensor, *indices: Tensor
    ) -> None:
        self.tables = tables
        self.scores = scores.detach().requires_grad_()
        with torch.enable_grad(), _Reader(tables) as reader:
            self.value = score_mod(self.scores, *indices)
        self.reads = reader.reads

    def backward(self, gradient: Tensor, totals: tuple[Tensor, ...]) -> Tensor:
        """The gradient of the scores; those of the captured tensors are added to `totals`."""
        if not self.value.requires_grad:
            return torch.zeros_like(self.scores)
        inputs = [self.scores, *(value for _, _, value in self.reads), *self.tables]
        scores, *rest = torch.autograd.grad(
            self.value, inputs, gradient.to(self.value.dtype), allow_unused=True
        )
        for (which, index, _), part in zip(self.reads, rest):
            if part is not None:
                totals[which].index_put_(index, part.to(totals[which].dtype), accumulate=True)
        for total, part in zip(totals, rest[len(self.reads) :]):
            if part is not None:
                total += part
        return torch.zeros_like(self.scores) if scores is None else scores


class _Finder(TorchFunctionMode):
    """Notes every argument that requires a gradient; under `no_grad` only captured tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, tuple((kwargs or {}).values()))):
            if tensor.requires_grad:
                self.found.setdefault(id(tensor), tensor)
        return func(*args, **(kwargs or {}))


class _Reader(TorchFunctionMode):
    """Makes what `table[index]` reads from a captured table a variable of its own."""

    def __init__(self, tables: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.which = {id(table): i for i, table in enumerate(tables)}
        self.reads: list[tuple[int, tuple[Tensor, ...], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        vmapped = torch._C._are_functorch_transforms_active()  # nothing inside can be a variable of its own
        if func is Tensor.__getitem__ and id(args[0]) in self.which and not vmapped:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(one, Tensor) for one in index):
                value = args[0].detach()[index].requires_grad_()
                self.reads.append((self.which[id(args[0])], index, value))
                return value
        return func(*args, **(kwargs or {}))


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list):
        for one in given:
            yield from _tensors(one)
