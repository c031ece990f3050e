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


def tables_with_gradients(score_mod: ScoreMod | None, like: Tensor) -> tuple[Tensor, ...]:
    """The tensors requiring a gradient that `score_mod` reads, found by calling it on one score."""
    if score_mod is None or not torch.is_grad_enabled():
        return ()
    zero = torch.zeros((), dtype=torch.long, device=like.device)
    score = torch.zeros(1, 1, 1, 1, dtype=like.dtype, device=like.device)
    with torch.no_grad(), _Finder() as finder:
        score_mod(score, zero.view(1, 1, 1, 1), zero.view(1, 1, 1, 1), zero.view(1, 1), zero.view(1))
    return tuple(finder.tensors.values())


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

    def backward(self, grad_value: Tensor, grad_tables: tuple[Tensor, ...]) -> Tensor:
        """The gradient of the scores; those of the captured tensors are added to `grad_tables`."""
        if not self.value.requires_grad:
            return torch.zeros_like(self.scores)
        inputs = [self.scores, *(value for _, _, value in self.reads), *self.tables]
        grad_scores, *grads = torch.autograd.grad(
            self.value, inputs, grad_value.to(self.value.dtype), allow_unused=True
        )
        for (which, index, _), grad in zip(self.reads, grads):
            if grad is not None:
                grad_table = grad_tables[which]
                grad_table.index_put_(index, grad.to(grad_table.dtype), accumulate=True)
        for grad_table, grad in zip(grad_tables, grads[len(self.reads) :]):
            if grad is not None:
                grad_table += grad
        return torch.zeros_like(self.scores) if grad_scores is None else grad_scores


class _Finder(TorchFunctionMode):
    """Notes every argument that requires a gradient; under `no_grad` only captured tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, tuple((kwargs or {}).values()))):
            if tensor.requires_grad:
                self.tensors.setdefault(id(tensor), tensor)
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
            if all(isinstance(entry, Tensor) for entry in index):
                value = args[0].detach()[index].requires_grad_()
                self.reads.append((self.which[id(args[0])], index, value))
                return value
        return func(*args, **(kwargs or {}))


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _tensors(argument)
