"""Patterns: who may see whom, as a FlexAttention `mask_mod` plus the keys that each run of queries needs.

Patterns compose: `Window(256) | Global(1)`, `Causal() & Strided(128)`; any function with FlexAttention's
signature `mask_mod(b, h, q_idx, kv_idx) -> bool` joins in as it is. A new pattern is a frozen dataclass
with two short methods: `allows`, the rule, and `keys`, where to look (every key, unless it says fewer).
"""

import ast
import dataclasses
import inspect
import itertools
import math
import typing
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyformer.core.context import Context
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.expression import first_name, plain
from polyformer.core.layout import Keys, Layout, Row, clip, subtract
from polyformer.core.mods import broadcasts
from polyformer.core.parsing import parse_expression
from polyformer.core.registry import register

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""mask_mod(b, h, q_idx, kv_idx) -> bool: FlexAttention's signature, and its meaning (`core.mods`)."""

LARGEST = 2**31 - 1
"""The largest number in an expression: a product of two fits into 64 bits."""

Where = Callable[[int, int], Keys] | Layout
"""Which keys a `mask_mod` needs: a function of a run of queries (start, stop), or the rows of a layout."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""score_mod(score, b, h, q_idx, kv_idx) -> score: FlexAttention's signature."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Base of all patterns; itself never used."""

    registry: ClassVar[dict[str, type["Pattern"]]] = {}
    row: ClassVar[str] = ""
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, named: bool = True, **options: object) -> None:
        """A subclass is read by its name in expressions, unless it is not `named` or begins with "_"."""
        super().__init_subclass__(**options)
        if named and not cls.__name__.startswith("_"):
            register(Pattern.registry, cls.__name__, cls, "pattern")

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Whether query `q_idx` may see key `kv_idx`; the indices broadcast, as in a `mask_mod`."""
        raise NotImplementedError

    def mask(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """`allows` for q_idx [Tq, 1] and kv_idx [Tk], with both axes there: [(B, H,) Tq, Tk]."""
        allowed = self.allows(context, b, h, q_idx, kv_idx)
        return allowed.expand(torch.broadcast_shapes(allowed.shape, (q_idx.shape[0], kv_idx.shape[0])))

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """The keys that queries start <= i < stop need; O(1) where the pattern is static."""
        return Keys(some=clip(0, context.kv_len, context.kv_len))

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Query indices where the needed keys change abruptly and a row of the layout should end."""
        return ()

    def relative(self, context: Context) -> bool:
        """Whether `allows` depends on `q_idx - kv_idx` alone, so that one mask serves a whole diagonal."""
        return False

    def reach(self) -> tuple[int, int] | None:
        """The least and the greatest distance at which a key is seen; None where there is no limit."""
        return None

    def lasting(self) -> bool:
        """Whether an equal pattern needs equal keys in all calls of equal lengths: plans can be kept."""
        return True

    def causal(self) -> bool:
        """Whether a decoder can have it: nothing that it says of a token hangs on later ones."""
        return True

    def step(self) -> int:
        """The step in slots: only tokens a multiple of it apart can meet. 1 where any two may."""
        return 1

    def every(self, context: Context, stride: int) -> "Pattern":
        """The same among the tokens of one residue class, `stride` slots of `context` apart."""
        from polyformer.core.classes import InClass  # it is a pattern itself

        return InClass(self, context, stride)

    def bound(self, by_slot: bool, device: torch.device) -> "Pattern":
        """The same for one call, with foreign functions looked through once.

        by_slot: whether queries count among all keys, or from 0 as in FlexAttention.
        """
        return self

    def at(self, layer: int) -> "Pattern":
        """What layer `layer` of a stack has; the same in all, unless a part says otherwise."""
        return self

    def of_head(self, head: int) -> "Pattern":
        """What head `head` has; the same for all, unless a part says otherwise. `attend` asks it first."""
        return self

    def mask_mod(self, context: Context) -> MaskMod:
        """This pattern as a FlexAttention `mask_mod`."""
        return broadcasts(lambda b, h, q_idx, kv_idx: self.allows(context, b, h, q_idx, kv_idx))

    def layout(self, context: Context, block: int) -> Layout:
        """Rows of at most `block` queries with the keys they need, in O(Tq / block)."""
        edges = {*range(0, context.q_len, block), *self.cuts(context), context.q_len}
        inside = sorted(edge for edge in edges if 0 <= edge <= context.q_len)
        return tuple(Row(a, b, self.keys(context, a, b)) for a, b in itertools.pairwise(inside))

    def __and__(self, other: "Pattern | MaskMod") -> "Pattern":
        return And(self, _as_pattern(other))

    def __or__(self, other: "Pattern | MaskMod") -> "Pattern":
        return Or(self, _as_pattern(other))

    def __rand__(self, other: MaskMod) -> "Pattern":
        return And(_as_pattern(other), self)

    def __ror__(self, other: MaskMod) -> "Pattern":
        return Or(_as_pattern(other), self)

    @classmethod
    def examples(cls) -> tuple["Pattern", ...]:
        """Small instances that the contract tests run."""
        return (cls(),)

    @classmethod
    def picture(cls) -> tuple["Pattern", Context]:
        """An instance and a call, of one row, that show the idea in the documentation."""
        return cls.examples()[0], Context(48, 48)

    def to_text(self) -> str:
        """The expression that makes this pattern; `from_text` reads it back."""
        options = ", ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"{type(self).__name__}({options})"

    @staticmethod
    def from_text(text: str) -> "Pattern":
        """The pattern that an expression such as `Window(256) | Global(1)` describes; nothing is executed.

        Raises `InputError` for anything but pattern names, literal arguments, `&`, `|` and parentheses.
        """
        expected = "an expression like 'Window(256) | Global(1)'"
        return _read(parse_expression(text, "pattern", expected), text)

    @staticmethod
    def meant(data: object) -> "Pattern | None":
        """`data` if it is a pattern or an expression that begins with the name of one, else None."""
        if isinstance(data, str) and first_name(data) in Pattern.registry:
            return Pattern.from_text(data)
        return data if isinstance(data, Pattern) else None


@dataclasses.dataclass(frozen=True)
class _Pair(Pattern):
    """Two patterns joined; `&` and `|` differ only in how they join."""

    left: Pattern
    right: Pattern

    sign: ClassVar[str] = ""

    def cuts(self, context: Context) -> tuple[int, ...]:
        return (*self.left.cuts(context), *self.right.cuts(context))

    def relative(self, context: Context) -> bool:
        return self.left.relative(context) and self.right.relative(context)

    def lasting(self) -> bool:
        return self.left.lasting() and self.right.lasting()

    def causal(self) -> bool:
        return self.left.causal() and self.right.causal()

    def every(self, context: Context, stride: int) -> Pattern:
        return self._of(self.left.every(context, stride), self.right.every(context, stride))

    def bound(self, by_slot: bool, device: torch.device) -> Pattern:
        return self._of(self.left.bound(by_slot, device), self.right.bound(by_slot, device))

    def at(self, layer: int) -> Pattern:
        return self._of(self.left.at(layer), self.right.at(layer))

    def of_head(self, head: int) -> Pattern:
        return self._of(self.left.of_head(head), self.right.of_head(head))

    def _of(self, left: Pattern, right: Pattern) -> Pattern:
        """Other parts joined alike; itself where they are its own, so that plain patterns cost nothing."""
        return self if left is self.left and right is self.right else type(self)(left, right)

    def to_text(self) -> str:
        return f"({self.left.to_text()} {self.sign} {self.right.to_text()})"


@dataclasses.dataclass(frozen=True)
class And(_Pair, named=False):
    """What both patterns allow."""

    sign: ClassVar[str] = "&"

    def reach(self) -> tuple[int, int] | None:
        left, right = self.left.reach(), self.right.reach()
        if left is None or right is None:
            return left or right
        return max(left[0], right[0]), min(left[1], right[1])

    def step(self) -> int:
        return math.lcm(self.left.step(), self.right.step())

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.left.allows(context, b, h, q_idx, kv_idx) & self.right.allows(
            context, b, h, q_idx, kv_idx
        )

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        return self.left.keys(context, start, stop) & self.right.keys(context, start, stop)


@dataclasses.dataclass(frozen=True)
class Or(_Pair, named=False):
    """What either pattern allows."""

    sign: ClassVar[str] = "|"

    def reach(self) -> tuple[int, int] | None:
        left, right = self.left.reach(), self.right.reach()
        return None if left is None or right is None else (min(left[0], right[0]), max(left[1], right[1]))

    def step(self) -> int:
        return math.gcd(self.left.step(), self.right.step())

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.left.allows(context, b, h, q_idx, kv_idx) | self.right.allows(
            context, b, h, q_idx, kv_idx
        )

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        return self.left.keys(context, start, stop) | self.right.keys(context, start, stop)


@dataclasses.dataclass(frozen=True)
class Without(_Pair, named=False):
    """What the left pattern allows and the right one does not."""

    sign: ClassVar[str] = "without"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        right = self.right.allows(context, b, h, q_idx, kv_idx)
        return self.left.allows(context, b, h, q_idx, kv_idx) & ~right

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        left, right = self.left.keys(context, start, stop), self.right.keys(context, start, stop)
        return Keys(tuple(subtract(left.some, right.full)), tuple(subtract(left.full, right.some)))


def _as_pattern(given: Pattern | MaskMod) -> Pattern:
    from polyformer.core.foreign import as_pattern  # a foreign function is a pattern itself

    return as_pattern(given)


def _text(value: Any) -> str:
    """A field of a pattern, as `from_text` reads it."""
    if isinstance(value, Pattern):
        return value.to_text()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _read(node: ast.expr, text: str) -> Pattern:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        left, right = _read(node.left, text), _read(node.right, text)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    name = node.func if isinstance(node, ast.Call) else node
    if not isinstance(name, ast.Name):
        raise InputError(
            f"pattern: expected names joined by & and |, got {quote(ast.unparse(node))} in {quote(text)}"
        )
    if name.id not in Pattern.registry:
        raise unknown("pattern", name.id, Pattern.registry)
    positional, keywords = ([], {}) if not isinstance(node, ast.Call) else (
        [_argument(one, text) for one in node.args],
        {str(one.arg): _argument(one.value, text) for one in node.keywords},
    )  # fmt: skip
    return _build(Pattern.registry[name.id], positional, keywords)


def _build(pattern: type[Pattern], positional: list[Any], keywords: dict[str, Any]) -> Pattern:
    """The pattern with these fields, checked by name and type, and numbers by size, as a file's are."""
    from polyformer.core.config import decode  # which reads patterns itself

    where, names = f"pattern {pattern.__name__}", [field.name for field in dataclasses.fields(pattern)]
    for name in keywords:
        if name not in names:
            raise unknown(f"option of {where}", name, names)
    try:
        given = inspect.signature(pattern).bind(*positional, **keywords).arguments
    except TypeError as error:
        raise InputError(f"{where}: {error}") from None
    hints = typing.get_type_hints(pattern)
    values = {name: decode(hints[name], value, f"{where}: {name}") for name, value in given.items()}
    for name, value in values.items():
        if isinstance(value, int) and abs(value) > LARGEST:
            raise InputError(f"{where}: {name}: expected at most {LARGEST}, got {quote(value)}")
    return pattern(**values)


def _argument(node: ast.expr, text: str) -> Any:
    """A plain value, a pattern, or a list of arguments."""
    if isinstance(node, ast.List | ast.Tuple):
        return tuple(_argument(one, text) for one in node.elts)
    name = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.BinOp) or (isinstance(name, ast.Name) and name.id in Pattern.registry):
        return _read(node, text)
    return plain(node, "pattern")
