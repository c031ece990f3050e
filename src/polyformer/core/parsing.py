"""External text as data: JSON, YAML, and parts that are written as expressions.

Every parser here returns plain data or raises `InputError`, for any text. `polyformer.core.ranges` has the
limits of size and nesting. A name may occur only once in its mapping, numbers are finite, and YAML has no
aliases: with aliases 300 bytes can describe more data than memory can hold.

Expressions such as `lsh(buckets=8, window=16)` and `Window(256) | Global(1)` are never executed:

    expression = name | name(value, ..., name=value, ...) | expression & expression | expression | expression
    value      = number | 'text' | true | false | null | [value, ...] | {'text': value, ...} | expression

Configurations take names with named values only, and parse a value that is an expression when they decode it;
patterns (`patterns/base.py`) take the full grammar.
"""

import ast
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import yaml

from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import (
    DEPTH,
    EXPRESSION_BYTES,
    EXPRESSION_DEPTH,
    INTEGER_BITS,
    JSON_BYTES,
    YAML_BYTES,
)

NO_LIMIT = int(1e30)
"""The value that transformers writes as a tokenizer's largest length for no limit: the only wider integer."""

_JSON_NAMES = {dict: "an object", list: "a list"}


def parse_json(
    text: str | bytes, source: object, expected: type = object, *, finite: bool = True, way_out: str = ""
) -> Any:
    """Return the content of a JSON text of at most 256 MiB: an `expected` (dict, list).

    `source` names the text in messages: a file, or a file and a line; `way_out` ends the message for a text
    that is not JSON. Without `finite` Python's NaN and Infinity are accepted too.
    """
    _check_size(text, JSON_BYTES, source)
    try:
        data = json.loads(text, object_pairs_hook=_once_each, parse_int=_integer)
    except RecursionError:
        raise _too_deep(source) from None
    except _RefusedError as error:
        raise InputError(f"{source}: {error}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InputError(f"{source}: not JSON ({error.msg}, {where}){way_out}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not JSON (not UTF-8 text: {error.reason}){way_out}") from None
    _check_depth(data, source)
    if finite:
        check_numbers(data, source)
    _check_text(text, data, source)
    if not isinstance(data, expected):
        raise InputError(f"{source}: expected {_JSON_NAMES[expected]}, got {quote(data)}")
    return data


def parse_yaml(text: str | bytes, source: object, way_out: str = "") -> Any:
    """Return the content of a YAML text of at most 256 KiB: plain data, without aliases, dates or tags.

    `way_out` ends the message for a text that is not YAML.
    """
    return _loaded(text, source, way_out, _Loader)


def parse_yaml_texts(text: str | bytes, source: object) -> Any:
    """Return the content of a YAML text in the order of `parse_yaml`, with each name and value as written.

    Numbers stay texts, "3e-3" and not 0.003, and so do true, false and null.
    """
    return _loaded(text, source, "", _TextLoader)


def _loaded(text: str | bytes, source: object, way_out: str, loader: type[yaml.SafeLoader]) -> Any:
    _check_size(text, YAML_BYTES, source)
    try:
        data = yaml.load(text, Loader=loader)
    except RecursionError:
        raise _too_deep(source) from None
    except _RefusedError as error:
        raise InputError(f"{source}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{source}{where}: not YAML ({error.problem or error.context}){way_out}") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError, LookupError) as error:
        # The constructors of numbers raise the errors of their parts.
        raise InputError(f"{source}: not YAML ({' '.join(str(error).split())}){way_out}") from None
    return data


def dump_yaml(data: object) -> str:
    """Return `data` as YAML that `parse_yaml` reads back: without aliases, names in their order."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def parse_expression(text: str, source: str, expected: str) -> ast.expr:
    """Return the tree of a Python expression of at most 64 KiB and 128 nodes deep; nothing is executed.

    `expected` describes the expected text in messages.
    """
    _check_size(text, EXPRESSION_BYTES, source)
    stripped = text.strip()
    try:
        tree = ast.parse(stripped, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # ValueError: NUL characters, surrogates, integers with too many digits. MemoryError: the parser's
        # error for too many levels.
        raise InputError(f"{source}: expected {expected}, got {quote(stripped)}") from None
    level: list[ast.AST] = [tree]
    for _ in range(EXPRESSION_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise _too_deep(source)


def literal(node: ast.expr, source: str) -> Any:
    """Return the plain value of a node of an expression."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise InputError(f"{source}: expected a plain value, got {quote(ast.unparse(node))}") from None
    check_numbers(value, source)
    return value


def check_numbers(data: object, source: object) -> None:
    """Raise `InputError` for a number in nested `data` that is not finite, or an integer over 64 bits."""
    level: list[Any] = [data]
    while level:
        for value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{source}: expected finite numbers, got {value}")
            if isinstance(value, int) and value.bit_length() > INTEGER_BITS and value != NO_LIMIT:
                raise InputError(f"{source}: expected integers of at most 64 bits, got {quote(value)}")
        level = [child for value in level for child in _children(value)]


class _RefusedError(Exception):
    """A violation of the limits, found inside a parser; the caller adds the name of the file."""


def _check_size(text: str | bytes, most: int, source: object) -> None:
    if len(text) > most:
        raise InputError(f"{source}: it has {len(text)} characters, expected at most {most}")


def _too_deep(source: object) -> InputError:
    return InputError(f"{source}: nested too deeply, expected at most {DEPTH} levels")


def _check_depth(data: object, source: object) -> None:
    level = [data]
    for _ in range(DEPTH + 1):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return
    raise _too_deep(source)


def _check_text(text: str | bytes, data: object, source: object) -> None:
    """Raise `InputError` for half a surrogate pair, which no file and no tokenizer accepts."""
    escaped = re.search(r"\\u[dD][89a-fA-F]", text) if isinstance(text, str) else b"\\u" in text
    try:
        if escaped:
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = quote(error.object[error.start])
        raise InputError(f"{source}: {half} is half of a character; write it with its other half") from None


def _children(data: object) -> Iterable[Any]:
    if isinstance(data, dict):
        return data.values()
    return data if isinstance(data, list | tuple | set | frozenset) else ()


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise _RefusedError(f"the name {quote(twice)} stands twice in one object; which value is meant?")
    return mapping


def _integer(text: str) -> int:
    if text == str(NO_LIMIT):
        return NO_LIMIT
    if len(text) > 21 or (number := int(text)).bit_length() > INTEGER_BITS:
        raise _RefusedError(f"expected integers of at most 64 bits, got one of {len(text)} digits")
    return number


class _Loader(yaml.SafeLoader):
    """The safe loader without aliases, repeated names, deep nesting and numbers beyond the limits."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases, and nesting deeper than `DEPTH`."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[union-attr]
            raise _RefusedError(f"line {mark.line + 1}: aliases (*name) are not read; write the value out")
        self.depth += 1
        if self.depth > DEPTH:
            raise _RefusedError(f"nested too deeply, expected at most {DEPTH} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a name that occurs twice."""
        if not isinstance(node, yaml.MappingNode):
            return super().construct_mapping(node, deep)
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            line = node.start_mark.line + 1
            raise _RefusedError(f"the mapping at line {line} has a name twice; which value is meant?")
        return mapping

    def construct_scalar(self, node: Any) -> Any:
        # The constructors of numbers take time quadratic in the number of digits.
        """Refuse numbers of more than 64 characters."""
        if node.tag in (_INT, _FLOAT) and len(node.value) > 64:
            raise _RefusedError(f"line {node.start_mark.line + 1}: expected numbers of at most 64 digits")
        return super().construct_scalar(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Refuse tags other than YAML's standard tags, infinite numbers and integers of more than 64 bits."""
        if node.tag not in _TAGS:
            raise _RefusedError(f"line {node.start_mark.line + 1}: the tag {quote(node.tag)} is not read")
        value = super().construct_object(node, deep)
        if isinstance(value, float) and not math.isfinite(value):
            raise _RefusedError(f"line {node.start_mark.line + 1}: expected finite numbers, got {node.value}")
        if isinstance(value, int) and value.bit_length() > INTEGER_BITS:
            raise _RefusedError(f"line {node.start_mark.line + 1}: expected integers of at most 64 bits")
        return value


class _TextLoader(_Loader):
    """The loader for which every plain scalar is a text."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Return True: every value is written out, even if it occurs twice."""
        return True


_TAG = "tag:yaml.org,2002:"
_INT, _FLOAT, _DATE = f"{_TAG}int", f"{_TAG}float", f"{_TAG}timestamp"
_TAGS = {_INT, _FLOAT, *(_TAG + name for name in ("null", "bool", "str", "seq", "map"))}
_DIGITS = list("-+0123456789")
# YAML 1.1 reads 1e-4, which has no point, as text, and some texts as dates; YAML 1.2 reads a number and a
# text.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != _DATE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(_FLOAT, re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+"), _DIGITS)
_TextLoader.yaml_implicit_resolvers = {}


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
