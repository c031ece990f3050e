"""Calls of modules: their evaluation mode, and errors for arguments of a wrong type.

A raw error of a call becomes an `InputError` that names the argument. The types are looked at after an error
only, so that a call without an error costs nothing more.
"""

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from polyformer.core.errors import InputError, quote


class Modules(Protocol):
    """An object with submodules: any `nn.Module`."""

    def modules(self) -> Iterator[nn.Module]:
        """Yield the module itself and all submodules."""
        ...


@contextlib.contextmanager
def evaluating(model: Modules) -> Iterator[None]:
    """Put the model in evaluation mode, and each of its modules back in its own mode at the end.

    As with `nn.Module.eval`, the mode belongs to the module and not to the thread: while a thread trains a
    model, other threads read a copy (`copy.deepcopy`).
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


Function = TypeVar("Function", bound=Callable[..., Any])

SHOWN = 3
"""Items of a sequence that are checked."""


def names_wrong_types(function: Function) -> Function:
    """Return the function with errors that name an argument of another type than its annotation.

    Other errors stay as they are. An argument of an overloaded function has the types of all overloads.
    """
    return _naming(function, function)


def names_wrong_types_of(annotated: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return `names_wrong_types` for a function that passes its arguments to another, `annotated`."""
    return lambda function: _naming(function, inspect.unwrap(annotated))


def _naming(function: Function, annotated: Callable[..., Any]) -> Function:
    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **named)
        try:
            return function(*args, **named)
        except InputError:
            raise
        except Exception as error:
            if (problem := wrong_argument(annotated, args, named)) is not None:
                raise InputError(problem) from error
            raise

    return typing.cast(Function, call)


def names_wrong_fields(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the `__post_init__` of a dataclass with errors that name a field of another type."""

    @functools.wraps(check)
    def call(instance: Any) -> None:
        if torch.compiler.is_compiling():
            return check(instance)
        try:
            return check(instance)
        except InputError:
            raise
        except (AttributeError, IndexError, TypeError, RuntimeError) as error:
            names = [field.name for field in dataclasses.fields(instance) if field.init]
            values = {name: getattr(instance, name) for name in names}
            problem = wrong_argument(type(instance).__init__, (instance,), values)
            raise InputError(
                problem or f"{type(instance).__name__}: {error}; expected other shapes"
            ) from error

    return call


def wrong_argument(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> str | None:
    """Return what is wrong with the first argument of another type than its annotation; None if none is."""
    try:
        hints = [typing.get_type_hints(each) for each in typing.get_overloads(function) or [function]]
        bound = inspect.signature(function).bind(*args, **named)
    except (NameError, TypeError):  # names that only a type checker sees; a call with other arguments
        return None
    for name, value in bound.arguments.items():
        choices = [each.get(name, Any) for each in hints]
        kind = bound.signature.parameters[name].kind
        values = value if kind is kind.VAR_POSITIONAL else () if kind is kind.VAR_KEYWORD else (value,)
        for each in values:
            if not any(fits(each, hint) for hint in choices):
                expected = " or ".join(dict.fromkeys(map(described, choices)))
                return f"{name}: expected {expected}, got {type(each).__name__} {quote(each)}"
    return None


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of an annotated type; of containers the first items are looked at."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if origin is typing.Annotated:
        return fits(value, arguments[0])
    if origin is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if hint is None or hint is type(None):
        return value is None
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float)
    if origin is collections.abc.Callable:
        return callable(value)
    if _has_instances(origin):  # a container; a text is no sequence of texts
        items = value[:SHOWN] if isinstance(value, list | tuple) else ()
        is_container = isinstance(value, origin) and not isinstance(value, str)
        return is_container and all(fits(item, arguments[0]) for item in items)
    if _has_instances(hint):
        return isinstance(value, hint)
    return True  # a type variable, a protocol, any


def _has_instances(kind: Any) -> bool:
    """Return whether `isinstance` can look for a class, which it cannot for most protocols."""
    return isinstance(kind, type) and not getattr(kind, "_is_protocol", False)


def described(hint: Any) -> str:
    """Return the name of an annotated type in words: "Tensor or None"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(described, arguments)))
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is typing.Annotated:
        return described(arguments[0])
    if origin is collections.abc.Callable:
        return "a function"
    if hint is None or hint is type(None):
        return "None"
    return getattr(origin or hint, "__name__", str(hint))
