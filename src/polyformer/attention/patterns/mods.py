"""Mods written for FlexAttention and their meaning: a function of scalars, for every pair of tokens.

FlexAttention calls a mod with scalar indices under `torch.vmap`, so the mod may index (`bias[b][h]`), reduce
(`(pos[q_idx] - pos[kv_idx]).norm()`) and loop as if there were a single pair. The meaning is the same here,
for every backend. Mods that are proven elementwise run on indices that broadcast (`mod_program`), in a
fraction of the time; all others run under `torch.vmap`.

Recording a program runs the mod on scalars, which takes longer than a small layer. All layers of a model and
all its steps use the same mod, so they share its program while all that the mod reads from outside is the
same. A program refers to the tensors that the mod reads and sees their present values; what else a mod reads
is compared before each use.

The mods of this library are written for indices that broadcast: [B, 1, 1, 1], [1, H, 1, 1], [Tq, 1] and [Tk],
or similar. `@broadcasts` marks them; for them q_idx counts the queries of the call instead of their slots.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.mod_program import (
    BranchError,
    MixedTypesError,
    Program,
    ScalarIndexing,
    program,
)
from polyformer.core.errors import InputError
from polyformer.core.ops.autograd import without_autocast

Function = TypeVar("Function", bound=Callable[..., Any])


def broadcasts(function: Function) -> Function:
    """Mark a mod that is written for indices that broadcast, and for the queries of one call."""
    function.broadcasts = True  # type: ignore[attr-defined]
    return function


def is_own(function: Callable[..., Any]) -> bool:
    """Return whether a mod takes indices that broadcast: it is marked with `broadcasts`, or is a `Mod`."""
    return isinstance(function, Mod) or getattr(function, "broadcasts", False)


@dataclasses.dataclass(frozen=True, eq=False)
class Mod:
    """A user's mod for indices that broadcast; scalar indices call the mod directly.

    name: "mask_mod" or "score_mod". start: added to q_idx. program: None if the mod requires `torch.vmap`.
    """

    function: Callable[..., Any]
    name: str
    program: Program | None
    start: int | Tensor = 0

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        name: str,
        score: torch.dtype | None,
        device: torch.device,
        start: int = 0,
    ) -> "Mod":
        """Return the mod, with its program if it has one; score: the type of the scores, None for a mask.

        Raises `InputError` for a mod that branches on its arguments or does not return a single value.
        """
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return cls(function, name, None, start)
        grad = torch.is_grad_enabled() and score is not None
        conditions = name, score, device, grad, torch.is_inference_mode_enabled(), torch.get_default_dtype()
        record = functools.partial(_record, function, name, score, device, grad)
        return cls(function, name, cached_program(function, conditions, record), start)

    def __call__(self, *places: Tensor) -> Tensor:
        """Return the values for `places`, (score,) b, h, q_idx, kv_idx, in a shape that broadcasts."""
        # `start` turns queries of the call into slots.
        places = (*places[:-2], places[-2] + self.start, places[-1])
        if all(x.dim() == 0 for x in places):
            value = self.function(*places)  # called by FlexAttention, under its vmap
        elif self.program is None or all(x.numel() == 1 for x in places):
            value = run_vmapped(self.function, *places)
        else:
            try:
                value = self.program(*places)
            except MixedTypesError:
                value = run_vmapped(self.function, *places)
        return value if self.name == "mask_mod" else value.to(places[0].dtype)


def _record(
    function: Callable[..., Any], name: str, score: torch.dtype | None, device: torch.device, grad: bool
) -> tuple[Program | None, bool]:
    """Run a mod on scalars; return its program, and whether the program is valid for later calls."""
    zero = torch.zeros((), dtype=torch.long, device=device)
    inputs = (zero,) * 4 if score is None else (zero.to(score), *(zero,) * 4)
    try:
        with torch.set_grad_enabled(grad), without_autocast(zero):
            traced, value, reusable = program(function, inputs)
    except BranchError:
        raise InputError(
            f"{name}: it reads the value of an index or a score (if, and, or, not, int(), .item()), "
            "but these represent all pairs of tokens at once; use torch.where, & | ~, or index a tensor"
        ) from None
    check_value(name, value)
    return traced, reusable


def check_value(name: str, value: Any) -> None:
    """Raise `InputError` unless `value` is a valid result of a mod for one pair."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected it to return a tensor, got {type(value).__name__}")
    if value.numel() != 1:
        raise InputError(
            f"{name}: expected one value for each pair of tokens, got shape {tuple(value.shape)}; "
            "its arguments are scalars, as in FlexAttention"
        )
    if name == "mask_mod" and value.dtype != torch.bool:
        raise InputError(f"mask_mod: expected it to return bool, got {value.dtype}; compare, or add .bool()")


def run_vmapped(function: Callable[..., Any], *places: Tensor) -> Tensor:
    """Return `function` of the scalars of each pair; the result broadcasts to `places`, which broadcast."""
    shape = torch.broadcast_shapes(*(x.shape for x in places))
    if 0 in shape:
        return places[0].new_zeros(shape, dtype=places[0].dtype if len(places) == 5 else torch.bool)
    # Leading axes of size 1 give all indices the same number of axes.
    aligned = [x.view(*[1] * (len(shape) - x.dim()), *x.shape) for x in places]
    call = function
    # A vmap per axis with several indices; the last one applied is the outermost and maps axis 0.
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            call = torch.vmap(call, in_dims=tuple(None if x.shape[axis] == 1 else 0 for x in aligned))
    scalars = [x.squeeze() for x in aligned]
    if len(places) == 5:
        scalars[0] = scalars[0].clone()  # a mod may write to its score
    with ScalarIndexing():
        value = call(*scalars)
    pairs = sum(size > 1 for size in shape)
    value = value[(..., *[0] * (value.dim() - pairs))]  # the value of a mod may have the shape [1]
    return value[tuple(slice(None) if size > 1 else None for size in shape)]


NUMBERS = bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device
"""Types of values that never change."""

DYNAMIC = "__import__", "eval", "exec", "getattr", "globals", "open", "vars"
"""Functions of Python by which a mod could read anything."""

Captures = tuple[Hashable, list[Tensor]]

_kept: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Captures, Program | None]]]
_kept = weakref.WeakKeyDictionary()


def cached_program(
    function: Callable[..., Any], key: Hashable, record: Callable[[], tuple[Program | None, bool]]
) -> Program | None:
    """Return the program of a mod or None; `record` it if the mod or a value that it reads has changed.

    key: the conditions of a recording besides the function. record: returns the program, and whether it is
    valid for later calls.
    """
    captures = _captures(function)
    if captures is None:
        return record()[0]
    programs = _kept.setdefault(function, {})
    before = programs.get(key)
    if before is not None and before[0][0] == captures[0]:
        return before[1]
    program, reusable = record()
    if reusable:
        programs[key] = captures, program
    else:
        programs.pop(key, None)
    return program


def rule_key(function: Callable[..., Any]) -> Hashable | None:
    """Return a value that is equal for mods with equal results: the code, and the numbers that it reads.

    None if the mod reads a tensor or anything else that may change.
    """
    captures = _captures(function)
    return None if captures is None or captures[1] else captures[0]


def _captures(function: Callable[..., Any]) -> Captures | None:
    """Return a description of all values that a function reads from outside, and the tensors among them.

    None if it may read anything that could change without a trace, such as an attribute of an object or an
    entry of a list. The tensors must stay alive, because the description has their identities.
    """
    if not isinstance(function, types.FunctionType):
        return None
    code = function.__code__
    defaults = function.__defaults__ or function.__kwdefaults__
    if not (function.__closure__ or defaults or _names(code)):
        return (code,), []
    parts: list[Hashable] = []
    tensors: list[Tensor] = []
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if type(value) in (Tensor, nn.Parameter):
            tensors.append(value)
            # `data_ptr` changes if other memory is assigned to `data`.
            parts.append((id(value), value.data_ptr(), value.shape, value.dtype, value.requires_grad))
        elif isinstance(value, NUMBERS):
            parts.append((type(value), value))
        elif _is_constant(value):
            parts.append(id(value))
        elif isinstance(value, types.FunctionType):
            parts.append(value.__code__)
            if id(value) not in seen:
                seen.add(id(value))
                waiting.extend(_reads(value))
        else:
            return None
    return tuple(parts), tensors


def _is_constant(value: Any) -> bool:
    """Return whether a value is a module or function of torch or of Python."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in ("torch", "math", "operator")
    module = getattr(value, "__module__", None) or ""
    return isinstance(value, types.BuiltinFunctionType | types.FunctionType) and (
        module.partition(".")[0] in ("torch", "math", "operator", "_operator")
    )


def _reads(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of the closure, the defaults and the global names of a function."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable without a value yet
            yield object()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]
        elif name in DYNAMIC:
            yield object()


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """Return the names of global values and of attributes in a function and the functions inside it."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*inner)
