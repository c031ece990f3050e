"""Patterns written as expressions, `Window(256) | Global(1)`: parsed and built, never executed."""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.expression import plain

LARGEST = 2**31 - 1
"""The largest number in an expression: a product of two fits into 64 bits."""


def read(node: ast.expr, text: str, registry: Mapping[str, type]) -> Any:
    """What a parsed expression describes, its names looked up in the `registry` of patterns.

    Raises `InputError`, which quotes `text`, the whole expression, for anything but these names, literal
    arguments, `&`, `|` and parentheses.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = read(node.left, text, registry), read(node.right, text, registry)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise InputError(
            f"pattern: expected names joined by & and |, got {quote(ast.unparse(node))} in {quote(text)}"
        )
    if name.id not in registry:
        raise unknown("pattern", name.id, registry)
    positional, keywords = (
        ([], {})
        if not isinstance(node, ast.Call)
        else (
            [_argument(argument, text, registry) for argument in node.args],
            {str(keyword.arg): _argument(keyword.value, text, registry) for keyword in node.keywords},
        )
    )
    return _build(registry[name.id], positional, keywords)


def _build(pattern: type, positional: list[Any], keywords: dict[str, Any]) -> Any:
    """The pattern with these fields, checked by name and type, and numbers by size, as a file's are."""
    where, names = f"pattern {pattern.__name__}", [field.name for field in dataclasses.fields(pattern)]
    for name in keywords:
        if name not in names:
            raise unknown(f"option of {where}", name, names)
    try:
        arguments = inspect.signature(pattern).bind(*positional, **keywords).arguments
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None
    hints = typing.get_type_hints(pattern)
    values = {name: decode(hints[name], value, f"{where}: {name}") for name, value in arguments.items()}
    for name, value in values.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise InputError(f"{where}: {name}: expected at most {LARGEST}, got {quote(value)}")
    return pattern(**values)


def _argument(node: ast.expr, text: str, registry: Mapping[str, type]) -> Any:
    """A plain value, a pattern, or a list of arguments."""
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_argument(element, text, registry) for element in node.elts)
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.BinOp) or (isinstance(name, ast.Name) and name.id in registry):
        return read(node, text, registry)
    return plain(node, "pattern")
