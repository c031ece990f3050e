"""A FlexAttention mod as a list of elementwise operations, which can run for all pairs at once.

A mod is a function of scalars. One recorded run on scalar indices shows its operations. The same operations
on indices that broadcast give, for each pair, the value on its scalars, if every operation that depends on an
index or the score is

- an elementwise operation on scalars (`q_idx >= kv_idx`, `torch.where`, `tanh`, a cast), or
- an entry of a tensor selected by one scalar index per axis (`table[b, q_idx - kv_idx]`).

Python only ever sees scalars, so the shapes, loops and tests of the mod mean the same as in FlexAttention.
Everything else (a row `pos[q_idx]`, a sum over it, a slice, an in-place operation) runs under `torch.vmap`:
see `mods`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from polyformer.core.errors import InputError, quote

aten = torch.ops.aten

ELEMENTWISE = {
    aten._to_copy.default,
    aten.detach.default,
    aten.floor_divide.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
"""Elementwise operations without a pointwise tag in torch."""

ALIASES = {aten.alias.default, aten.detach.default, aten.lift_fresh.default}
"""Operations with a result that shares the memory of a tensor and therefore changes with it."""

OPTIONS_ONLY = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}
"""Operations that read only the type and device of a tensor, not its values."""

VALUE_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
"""Operations that read values of a tensor into Python."""

INDICES = torch.int64, torch.int32

UNDISPATCHED = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage}
"""Functions that access the values of a tensor without a dispatched operation."""


class BranchError(Exception):
    """The mod reads the value of an index or a score, which represents the values of all pairs."""


class MixedTypesError(Exception):
    """Type promotion differs between tensors and scalars: the program does not compute the mod."""


@dataclasses.dataclass(frozen=True)
class ValueRef:
    """The value of operation `number`, counted after the inputs."""

    number: int
    varies: bool  # from pair to pair


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """A recorded operation; `args` and `kwargs` have a `ValueRef` for each earlier value."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: ValueRef
    dtype: torch.dtype
    constant: bool  # detached from the graph, by a `no_grad` around it

    def refs(self) -> Iterator[ValueRef]:
        """Yield the values that the operation reads."""
        return (x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, ValueRef))

    def run(self, values: dict[int, Tensor]) -> Tensor:
        """Return the value of the operation.

        Tensors that are the same for all pairs get an axis, so that type promotion treats all operands alike.
        """
        if not self.out.varies:
            fill = lambda x: values[x.number] if isinstance(x, ValueRef) else x  # noqa: E731
            return self.function(*tree_map(fill, self.args), **tree_map(fill, self.kwargs))
        if self.function is aten.index.Tensor:
            table, index = self.args
            table = values[table.number] if isinstance(table, ValueRef) else table
            return table[tuple(_broadcast(x, values) for x in index)]
        args = [_broadcast(x, values) for x in self.args]
        return self.function(*args, **{name: _broadcast(x, values) for name, x in self.kwargs.items()})


def _broadcast(x: Any, values: dict[int, Tensor]) -> Any:
    if isinstance(x, ValueRef):
        return values[x.number] if x.varies else values[x.number].unsqueeze(0)
    return x.unsqueeze(0) if isinstance(x, Tensor) else x


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The operations of a mod, for indices that broadcast."""

    operations: tuple[Operation, ...]
    result: ValueRef | Tensor

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the values of the mod, in a shape that broadcasts to the inputs.

        Raises `MixedTypesError` if the operations promote types differently from the mod.
        """
        values = dict(enumerate(inputs))
        for operation in self.operations:
            # The mod computed this value under `no_grad`, so it gets no gradient here either.
            if operation.constant and torch.is_grad_enabled():
                with torch.no_grad():
                    value = operation.run(values)
            else:
                value = operation.run(values)
            if value.dtype != operation.dtype:
                raise MixedTypesError
            values[operation.out.number] = value
        return values[self.result.number] if isinstance(self.result, ValueRef) else self.result


def _called(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """Return what a mod returns; raises `InputError` for a function of other arguments."""
    try:
        return function(*inputs)
    except TypeError as error:
        names = "(score, b, h, q_idx, kv_idx)" if len(inputs) > 4 else "(b, h, q_idx, kv_idx)"
        raise InputError(f"{quote(function)}: expected a function of {names}; it raised {error}") from error


def program(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Program | None, Any, bool]:
    """Return the program of `function` (None if it has none) and the function's result for scalar `inputs`.

    The third value is False if the program contains values that were computed from captured tensors: it is
    valid for this call only. Raises `BranchError` if the function reads the value of an index or a score.
    """
    before = _sequence_number()
    inputs = tuple(_input(x) for x in inputs)
    with OperationRecorder(inputs) as recorder, ScalarIndexing(recorder):
        result = _called(function, inputs)
    if (
        not isinstance(result, Tensor)
        or not recorder.elementwise
        or _has_custom_function(result.grad_fn, before)
    ):
        return None, result, not recorder.folds
    ref = recorder.ref(result)
    if ref is None and (recorder.is_untracked(result) or result.dim()):
        return None, result, not recorder.folds
    operations = _live_operations(recorder.operations, ref)
    return Program(operations, result if ref is None else ref), result, not recorder.folds


def _sequence_number() -> int:
    """Return the sequence number of the next operation in autograd."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def _input(x: Tensor) -> Tensor:
    """Return a copy of the scalar; it requires a gradient if scores do, which reveals custom functions."""
    x = x.detach().clone()
    wanted = torch.is_grad_enabled() and x.is_floating_point()
    return x.requires_grad_().clone() if wanted else x


def _live_operations(operations: list[Operation], ref: ValueRef | None) -> tuple[Operation, ...]:
    """Return the operations that the value in `ref` depends on."""
    wanted, kept = set() if ref is None else {ref.number}, []
    # Backwards from the result, keep the operations whose values are read.
    for operation in reversed(operations):
        if operation.out.number in wanted:
            kept.append(operation)
            wanted.update(x.number for x in operation.refs())
    return tuple(reversed(kept))


def _has_custom_function(node: Any, before: int) -> bool:
    """Return whether a graph made since number `before` has a custom autograd function."""
    # Nodes older than `before` belong to captured tensors and are not followed.
    waiting, seen = [node], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < before:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False


class OperationRecorder(TorchDispatchMode):
    """Record of the operations of a mod, and of whether all that vary from pair to pair are elementwise."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.elementwise = True
        self.folds = False  # whether the mod computes with the present values of captured tensors only
        self.before = _sequence_number()
        self.grad = torch.is_grad_enabled()
        self.refs: dict[int, ValueRef] = {}
        self.alive: list[Tensor] = []  # keeps the tensors alive, so that no id is reused
        self.varying: set[int] = set()  # storages of these values
        for x in inputs:
            self._register(x, varies=True)

    def _register(self, x: Tensor, varies: bool) -> ValueRef:
        ref = ValueRef(len(self.alive), varies)
        self.refs[id(x)] = ref
        self.alive.append(x)
        if varies:
            self.varying.add(x.untyped_storage()._cdata)
        return ref

    def ref(self, x: Tensor) -> ValueRef | None:
        """Return the reference to a value of the mod; None if it does not depend on the inputs."""
        return self.refs.get(id(x))

    def is_untracked(self, x: Tensor) -> bool:
        """Return whether an unrecorded tensor may depend on a recorded tensor, as a view or by autograd."""
        made_since = x.grad_fn is not None and x.grad_fn._sequence_nr() >= self.before
        return made_since or x.untyped_storage()._cdata in self.varying

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        refs = [ref for x in tensors if (ref := self.ref(x)) is not None]
        varies = any(ref.varies for ref in refs) or any(
            self.is_untracked(x) for x in tensors if self.ref(x) is None
        )
        if varies and func in VALUE_READS:
            raise BranchError
        out = func(*args, **kwargs)
        # `new_zeros` and similar do not read values: the result is the same for all pairs.
        if func in OPTIONS_ONLY:
            varies = False
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            self.elementwise = False
        learned = self.grad and any(x.requires_grad or self.ref(x) is not None for x in tensors)
        if varies or learned:
            self._append(func, args, kwargs, tensors, out, varies)
        elif tensors and func not in ALIASES and func not in OPTIONS_ONLY:
            self.folds = True
        return out

    def _append(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any, varies: bool
    ) -> None:
        if any(self.ref(x) is None and self.is_untracked(x) for x in tensors):
            self.elementwise = False
        if varies and not self._is_elementwise(func, args, tensors, out):
            self.elementwise = False
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and self.ref(x) is None:
                ref = self._register(x, varies)
                if isinstance(out, Tensor):
                    fill = lambda x: (self.ref(x) or x) if isinstance(x, Tensor) else x  # noqa: E731
                    constant = self.grad and not torch.is_grad_enabled()
                    self.operations.append(
                        Operation(func, tree_map(fill, args), tree_map(fill, kwargs), ref, x.dtype, constant)
                    )
                elif not varies:
                    self.elementwise = False  # several results of a captured tensor that requires gradients

    def _is_elementwise(self, func: Any, args: Any, tensors: list[Tensor], out: Any) -> bool:
        if not isinstance(out, Tensor) or out.dim():
            return False
        if func is aten.index.Tensor:
            table, index = args
            ref = self.ref(table)
            # A lookup is elementwise if every axis of the table is selected by one scalar index.
            picks = all(x is not None and x.dim() == 0 and x.dtype in INDICES for x in index)
            return picks and len(index) == table.dim() and (ref is None or not ref.varies)
        known = torch.Tag.pointwise in func.tags or func in ELEMENTWISE
        return known and all(x.dim() == 0 for x in tensors)


class ScalarIndexing(TorchFunctionMode):
    """Mode that runs `table[i]` with a scalar tensor i as an operation; torch would read the number i."""

    def __init__(self, recorder: OperationRecorder | None = None) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return index_with_scalars(*args)
        if self.recorder is not None and func in UNDISPATCHED:
            if self.recorder.ref(args[0]) is not None:
                raise BranchError
            self.recorder.folds = True
        return func(*args, **(kwargs or {}))


def index_with_scalars(table: Tensor, index: Any) -> Tensor:
    """Return table[index], where scalar tensors among the indices select as Python integers would."""
    entries = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_scalar, entries)):
        return table[index]
    # Only scalar indices: a single lookup, which a program can repeat for all pairs.
    if len(entries) <= table.dim() and all(_is_scalar(x) or type(x) is int for x in entries):
        index = [x if isinstance(x, Tensor) else torch.tensor(x, device=table.device) for x in entries]
        return aten.index.Tensor(table, index)
    # Scalars among slices: select their axes one by one, then apply the other entries.
    rest, axis = [], 0
    for place, entry in enumerate(entries):
        if _is_scalar(entry):
            table = table.index_select(axis, entry.view(1)).squeeze(axis)
            continue
        rest.append(entry)
        after = sum(map(_axes, entries[place + 1 :]))
        axis = table.dim() - after if entry is Ellipsis else axis + _axes(entry)
    return table[tuple(rest)]


def _is_scalar(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.dim() == 0 and entry.dtype in INDICES


def _axes(entry: Any) -> int:
    """Return the number of axes of a tensor that an index consumes."""
    if entry is None or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
