"""Patterns written as expressions, `Window(256) | Global(1)`: parsed and built, never executed."""

import ast
import dataclasses
import functools
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.limits import PATTERN_NUMBER
from polyformer.core.parsing import plain


def build_pattern(node: ast.expr, text: str, registry: Mapping[str, type]) -> Any:
    """Return the pattern of a parsed expression, with names looked up in the `registry` of patterns.

    Raises `InputError`, which quotes `text`, the whole expression, for anything but these names, literal
    arguments, `&`, `|` and parentheses.
    """
    # & and | of the syntax tree become `And` and `Or`; no Python code is evaluated.
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = build_pattern(node.left, text, registry), build_pattern(node.right, text, registry)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    name = node.func if isinstance(node, ast.Call) else node
    # A pattern is `Name` or `Name(arguments)`; attributes and other calls are refused.
    if not isinstance(name, ast.Name):
        raise InputError(
            f"pattern: expected names joined by & and |, got {quote(ast.unparse(node))} in {quote(text)}"
        )
    if name.id not in registry:
        raise unknown("pattern", name.id, registry)
    arguments, options = (node.args, node.keywords) if isinstance(node, ast.Call) else ([], [])
    positional = [_argument(argument, text, registry) for argument in arguments]
    keywords = {str(keyword.arg): _argument(keyword.value, text, registry) for keyword in options}
    return _instantiate(registry[name.id], positional, keywords)


def _instantiate(pattern: type, positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Return the pattern with these fields; names, types and sizes are checked, as in a file."""
    where, (signature, hints) = f"pattern {pattern.__name__}", _signature(pattern)
    names = [field.name for field in dataclasses.fields(pattern)]
    for name in keywords:
        if name not in names:
            raise unknown(f"option of {where}", name, names)
    try:
        # Python's rules for positional and keyword arguments, without calling the class.
        arguments = signature.bind(*positional, **keywords).arguments
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None
    # The same conversions and errors as for a value in a file.
    values = {name: decode(hints[name], value, f"{where}: {name}") for name, value in arguments.items()}
    for name, value in values.items():
        if isinstance(value, int) and abs(value) > PATTERN_NUMBER:
            raise InputError(f"{where}: {name}: expected at most {PATTERN_NUMBER}, got {quote(value)}")
    return pattern(**values)


@functools.cache
def _signature(pattern: type) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return a pattern's arguments and their types; an expression may have thousands of patterns."""
    return inspect.signature(pattern), typing.get_type_hints(pattern)


def _argument(node: ast.expr, text: str, registry: Mapping[str, type]) -> Any:
    """Return a plain value, a pattern, or a list of arguments."""
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_argument(element, text, registry) for element in node.elts)
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.BinOp) or (isinstance(name, ast.Name) and name.id in registry):
        return build_pattern(node, text, registry)
    return plain(node, "pattern")
