"""Gradients of the tensors that a `score_mod` captures: bias tables, slopes, lookup tables.

A closure does not declare the tensors that it reads. A small probe call under a `TorchFunctionMode` finds the
tensors that require a gradient. During a differentiated evaluation the same kind of mode records how they are
indexed, so that the gradient of `table[b, h, q_idx, bucket]` is added to a running total at these indices,
and no tile allocates a gradient of the full size of the table.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyformer.attention.patterns.base import ScoreMod
from polyformer.core.errors import InputError

READ_AT_TIMES = (
    "score_mod: it reads a tensor that requires a gradient in some calls only, as inside an `if`, and "
    "backend 'tiled' would lose its gradient; read it in every call and choose by torch.where, or use "
    'backend="definition"'
)


def tables_with_gradients(score_mod: ScoreMod | None, like: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors requiring a gradient that `score_mod` reads, by calling it on a single score."""
    if score_mod is None or not torch.is_grad_enabled():
        return ()
    zero = torch.zeros((), dtype=torch.long, device=like.device)
    score = torch.zeros(1, 1, 1, 1, dtype=like.dtype, device=like.device)
    with torch.no_grad(), _Finder() as finder:
        score_mod(score, zero.view(1, 1, 1, 1), zero.view(1, 1, 1, 1), zero.view(1, 1), zero.view(1))
    return tuple(finder.tensors.values())


def checked(score_mod: ScoreMod, tables: tuple[Tensor, ...]) -> ScoreMod:
    """Return a `score_mod` that raises `InputError` in the forward pass if it reads others than `tables`."""
    known = {*map(_memory, tables)}  # by storage, because views of a table are new tensors in each call

    def call(score: Tensor, *indices: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # the backward pass: see `Evaluation`
            return score_mod(score, *indices)
        with _Finder() as finder:
            value = score_mod(score, *indices)
        if not {*map(_memory, finder.tensors.values())} <= known:
            raise InputError(READ_AT_TIMES)
        return value

    return call


class Evaluation:
    """An evaluation of `score_mod` on a tile of scores that can be differentiated."""

    def __init__(
        self, score_mod: ScoreMod, tables: tuple[Tensor, ...], scores: Tensor, *indices: Tensor
    ) -> None:
        self.tables = tables
        self.scores = scores.detach().requires_grad_()
        with torch.enable_grad(), _Reader(tables) as reader:
            self.value = score_mod(self.scores, *indices)
        self.reads = reader.reads
        known = (self.scores, *tables, *(value for _, _, value in self.reads))
        if _reads_others(self.value.grad_fn, known):
            raise InputError(READ_AT_TIMES)

    def backward(self, grad_value: Tensor, grad_tables: tuple[Tensor, ...]) -> Tensor:
        """Return the gradient of the scores; add the gradients of the captured tensors to `grad_tables`."""
        # A score_mod may ignore the score and read no learned tensor.
        if not self.value.requires_grad:
            return torch.zeros_like(self.scores)
        # Values read by an index are separate leaves; tables that are used whole are inputs themselves.
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
    """A mode that records arguments that require a gradient; under `no_grad` only captured tensors do."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, tuple((kwargs or {}).values()))):
            if tensor.requires_grad:
                self.tensors.setdefault(id(tensor), tensor)
        return func(*args, **(kwargs or {}))


class _Reader(TorchFunctionMode):
    """A mode that makes the result of `table[index]` for a captured table a separate leaf variable."""

    def __init__(self, tables: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.which = {id(table): i for i, table in enumerate(tables)}
        self.reads: list[tuple[int, tuple[Tensor, ...], Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        vmapped = torch._C._are_functorch_transforms_active()  # a transform allows no leaf variables inside
        if func is Tensor.__getitem__ and id(args[0]) in self.which and not vmapped:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(entry, Tensor) for entry in index):
                value = args[0].detach()[index].requires_grad_()
                self.reads.append((self.which[id(args[0])], index, value))
                return value
        return func(*args, **(kwargs or {}))


def _reads_others(node: Any, known: tuple[Tensor, ...]) -> bool:
    """Return whether the graph behind `node` has leaves that are neither in `known` nor behind `known`."""
    seen = {tensor.grad_fn for tensor in known if tensor.grad_fn is not None}
    leaves = {id(tensor) for tensor in known if tensor.grad_fn is None}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in leaves:
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


def _memory(tensor: Tensor) -> int:
    """Return the storage that a tensor and its views share."""
    return tensor.untyped_storage()._cdata


def _tensors(arguments: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples and lists."""
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, tuple | list):
        for argument in arguments:
            yield from _tensors(argument)
