"""Attention patterns: a FlexAttention `mask_mod` plus the keys that each run of queries needs.

Patterns compose: `Window(256) | Global(1)`, `Causal() & Strided(128)`. Any function with FlexAttention's
signature `mask_mod(b, h, q_idx, kv_idx) -> bool` can be composed with them unchanged. A new pattern is a
frozen dataclass with two short methods: `allows`, the rule, and `keys`, the keys to visit (by default all of
them). Its `structure` says what else is known of the rule, for caches, tiles and graphs.

Files and the command line have patterns as expressions. `Pattern.from_text` parses an expression and builds
the patterns that it names; nothing is executed.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.layout import Keys, Layout, Row, Structure, clip
from polyformer.attention.patterns.mods import broadcasts
from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.parsing import first_name, parse_expression, plain
from polyformer.core.ranges import PATTERN_NUMBER, check_ranges
from polyformer.core.registry import Members, register
from polyformer.core.sequence.context import Context

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""mask_mod(b, h, q_idx, kv_idx) -> bool: FlexAttention's signature, with the same meaning
(`patterns.mods`).
"""

Where = Callable[[int, int], Keys] | Layout
"""The keys that a `mask_mod` needs: a function of a run of queries (start, stop), or the rows of a layout."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score_mod(score, b, h, q_idx, kv_idx) -> score: FlexAttention's signature."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """Base class of all patterns; not used directly."""

    registry: ClassVar[Members["Pattern"]] = Members()
    operators: ClassVar[dict[str, Callable[..., "Pattern"]]] = {}
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, named: bool = True, **options: object) -> None:
        """Register the subclass for expressions, unless `named` is False or its name begins with "_"."""
        super().__init_subclass__(**options)
        for name in inspect.get_annotations(cls):
            own = getattr(Pattern, name, None)
            if callable(own) or isinstance(own, property):
                raise InputError(
                    f"{cls.__name__}: the option {quote(name)} would hide the method of this name of "
                    "`Pattern`; rename the option"
                )
        # An underscore marks the base of a family, which nobody writes in an expression.
        if named and not cls.__name__.startswith("_"):
            register(Pattern.registry, cls.__name__, cls, "pattern")

    def __post_init__(self) -> None:
        """Check the ranges in the fields' types."""
        if not torch.compiler.is_compiling():  # a graph cannot contain the cache of the ranges
            check_ranges(self, f"{type(self).__name__}: ")

    def __eq__(self, other: object) -> bool:
        """Return whether two patterns of one class have no fields; a dataclass compares its fields instead.

        With `eq=False`, as for tables in tensors, a pattern equals itself only: plans and masks are stored by
        pattern.
        """
        if self is other or type(self) is not type(other):
            return self is other
        return not (vars(self) or vars(other))

    def __hash__(self) -> int:
        return hash(type(self))

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return whether query `q_idx` may see key `kv_idx`; the indices broadcast, as in a `mask_mod`."""
        raise NotImplementedError

    def mask(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return `allows` for q_idx [Tq, 1] and kv_idx [Tk], with both axes expanded: [(B, H,) Tq, Tk]."""
        allowed = self.allows(context, b, h, q_idx, kv_idx)
        # `allows` may depend on the queries or the keys only, and then lacks the other axis.
        return allowed.expand(torch.broadcast_shapes(allowed.shape, (q_idx.shape[0], kv_idx.shape[0])))

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys that queries start <= i < stop need; O(1) where the pattern is static."""
        # Correct for any rule: every key is visited, and `allows` masks it.
        return Keys(some=clip(0, context.kv_len, context.kv_len))

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the queries where a row of the layout should end: the needed keys change abruptly."""
        return ()

    @property
    def structure(self) -> Structure:
        """What all visible pairs have in common; by default nothing is known."""
        return Structure()

    def is_static(self) -> bool:
        """Return whether the needed keys depend only on a call's lengths, so that plans can be cached."""
        return True

    def causal(self) -> bool:
        """Return whether a decoder can use the pattern: no token's rule depends on later tokens."""
        return True

    def in_residue_class(self, stride: int) -> "Pattern | None":
        """Return this pattern among the tokens of one residue class, `stride` slots apart.

        None if no pattern describes it; the rule is then evaluated on the original slots
        (`call_parts.InResidueClass`).
        """
        return None

    def map_parts(self, function: "Callable[[Pattern], Pattern]") -> "Pattern":
        """Return this pattern with `function` applied to each pattern that it is composed of."""
        return function(self)

    def bind(self, by_slot: bool, device: torch.device) -> "Pattern":
        """Return this pattern for one call, with users' functions examined once.

        by_slot: whether query indices count among all keys, instead of from 0 as in FlexAttention.
        """
        return self

    def with_tables(self, context: Context, device: torch.device) -> "Pattern":
        """Return a pattern with the same `allows`, which computes no tables but reads them from `device`.

        A compiler that translates `allows` for a single pair (FlexAttention) can index finished tensors only.
        Patterns that compute tables derive from `TabulatedPattern`; all others return themselves.
        """
        return self

    def layer_pattern(self, layer: int) -> "Pattern":
        """Return the pattern of layer `layer` of a stack; by default the same in all layers."""
        return self

    def head_pattern(self, head: int) -> "Pattern":
        """Return the pattern of head `head`; by default the same for all heads. `attend` calls this first."""
        return self

    def heads_by_pattern(self, heads: int) -> "dict[Pattern, list[int]]":
        """Return the numbers of the heads that have each pattern, of `heads` heads."""
        groups: dict[Pattern, list[int]] = {}
        for head in range(heads):
            groups.setdefault(self.head_pattern(head), []).append(head)
        return groups

    def mask_mod(self, context: Context) -> MaskMod:
        """Return this pattern as a FlexAttention `mask_mod`."""
        return broadcasts(lambda b, h, q_idx, kv_idx: self.allows(context, b, h, q_idx, kv_idx))

    def layout(self, context: Context, block: int) -> Layout:
        """Return rows of at most `block` queries with the keys they need, in O(Tq / block)."""
        # Rows end at multiples of `block` and wherever the needed keys change abruptly.
        edges = {*range(0, context.q_len, block), *self.cuts(context), context.q_len}
        inside = sorted(edge for edge in edges if 0 <= edge <= context.q_len)
        return tuple(Row(a, b, self.keys(context, a, b)) for a, b in itertools.pairwise(inside))

    def __and__(self, other: "Pattern | MaskMod | str") -> "Pattern":
        # Looked up by its sign, because `composition` imports this module.
        return Pattern.operators["&"](self, other)

    def __or__(self, other: "Pattern | MaskMod | str") -> "Pattern":
        return Pattern.operators["|"](self, other)

    def __rand__(self, other: MaskMod | str) -> "Pattern":
        return Pattern.operators["&"](other, self)

    def __ror__(self, other: MaskMod | str) -> "Pattern":
        return Pattern.operators["|"](other, self)

    @classmethod
    def examples(cls) -> tuple["Pattern", ...]:
        """Return small instances for the contract tests; a pattern with required options overrides this."""
        try:
            return (cls(),)
        except TypeError as error:
            raise InputError(
                f"{cls.__name__}: it has options without defaults ({error}); define `examples`, "
                "a classmethod that returns small instances"
            ) from error

    @classmethod
    def picture(cls) -> tuple["Pattern", Context]:
        """Return an instance and a call of one batch row that illustrate the pattern in the documentation."""
        return cls.examples()[0], Context(48, 48)

    def to_text(self) -> str:
        """Return the expression of this pattern; `from_text` parses it back."""
        # Fields by name: the expression stays valid if a pattern gets another field.
        options = ", ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({options})"

    @staticmethod
    def from_text(text: str) -> "Pattern":
        """Return the pattern of an expression such as `Window(256) | Global(1)`; nothing is executed.

        Raises `InputError` for anything but pattern names, literal arguments, `&`, `|` and parentheses.
        """
        expected = "an expression like 'Window(256) | Global(1)'"
        return build_pattern(parse_expression(text, "pattern", expected), text, Pattern.registry)

    @staticmethod
    def parse(data: object) -> "Pattern | None":
        """Return a pattern, or an expression that begins with a pattern's name, as a pattern; else None."""
        # Other strings are names of mechanisms, which the caller looks up.
        if isinstance(data, str) and first_name(data) in Pattern.registry:
            return Pattern.from_text(data)
        return data if isinstance(data, Pattern) else None


class TabulatedPattern(Pattern, named=False):
    """Base of the patterns that look up tables: `with_tables` returns the pattern of the lookups."""

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return `allows` of the lookups, which the context stores for all layers."""
        device = kv_idx.device
        lookups = context.once((self, "tables", device), lambda: self.with_tables(context, device))
        return lookups.allows(context, b, h, q_idx, kv_idx)


def parts_in(part: object) -> Iterator[object]:
    """Yield `part` and all that it contains: the items of tuples and the fields of dataclasses."""
    yield part
    inner: Iterable[object] = ()
    if isinstance(part, tuple):
        inner = part
    elif dataclasses.is_dataclass(part):
        inner = (getattr(part, field.name) for field in dataclasses.fields(part))
    for value in inner:
        yield from parts_in(value)


def patterns_in(part: object) -> Iterator[Pattern]:
    """Yield all patterns in `part`, a pattern, a configuration or a tuple of them."""
    return (value for value in parts_in(part) if isinstance(value, Pattern))


def contains(part: object, kind: type[Pattern]) -> bool:
    """Return whether `part`, a pattern or a configuration, has a pattern of this kind."""
    return any(isinstance(pattern, kind) for pattern in patterns_in(part))


def _text(value: Any) -> str:
    """Return a field of a pattern in the syntax of `from_text`."""
    if isinstance(value, Pattern):
        return value.to_text()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


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
