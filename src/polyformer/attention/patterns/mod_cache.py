"""Programs of users' mods, kept for later calls while all that a mod reads from outside is the same.

Recording a program runs the mod on scalars, which takes longer than a small layer. All layers of a model and
all its steps use the same mod, so they share its program. A program refers to the tensors that the mod reads
and sees their present values; what else a mod reads is compared before each use.
"""

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.mod_program import Program

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
