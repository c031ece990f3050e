"""Parts written as expressions: `lsh(buckets=8, window=16)`, `Window(256) | Global(1)`. Nothing is executed.

    expression = name | name(value, ..., name=value, ...) | expression & expression | expression | expression
    value      = number | 'text' | true | false | null | [value, ...] | {'text': value, ...} | expression

Configurations take names with named values only, and parse a value that is an expression when they decode it;
patterns (`patterns/base.py`) take the full grammar.
"""

import ast
import re
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.core.parsing import literal, parse_expression

YAML_NAMES = {"true": True, "false": False, "null": None}
"""The spellings of YAML, in addition to Python's."""


def with_options(text: str, where: str) -> dict[str, Any]:
    """Return `kind` or `kind(name=value, ...)` as the mapping that a configuration decodes."""
    kind, bracket, rest = text.strip().partition("(")
    if not bracket:
        return {"kind": kind.strip()}
    expected = "'kind(name=value, ...)'"
    call = parse_expression(f"{kind.replace('-', '_')}({rest}", where, expected)
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise InputError(f"{where}: expected {expected}, got {quote(text.strip())}")
    return {
        "kind": kind.strip(),
        **{str(keyword.arg): _option(keyword.value, where) for keyword in call.keywords},
    }


def first_name(text: str) -> str:
    """Return the name at the beginning of an expression, without brackets."""
    return re.split(r"[\s()&|]", text.lstrip(" ("), maxsplit=1)[0]


def plain(node: ast.expr, where: str) -> Any:
    """Return the plain value of a node; raises `InputError` for anything that would have to be executed."""
    if isinstance(node, ast.Name) and node.id in YAML_NAMES:
        return YAML_NAMES[node.id]
    return literal(node, where)


def is_expression(node: ast.expr) -> bool:
    """Return whether a value is an expression: a name, a call, or two joined by & or |."""
    joined = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr)
    return joined or isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id not in YAML_NAMES)


def _option(node: ast.expr, where: str) -> Any:
    """Return a value; an expression remains text, for the field that it belongs to."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_option(item, where) for item in node.elts]
    return ast.unparse(node) if is_expression(node) else plain(node, where)
