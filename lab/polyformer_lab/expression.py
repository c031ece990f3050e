"""Expressions over the results of a study: the definitions of a claim and the conditions of its rule.

    loss[post, cold]                  the metric `loss` of a cell, by its labels: one number for each seed
    perplexity[alibi, :]              of all labels of an axis, [labels, seeds]
    perplexity[alibi, 256:2048]       of the labels between two numbers, both included
    mean(x), median(x), std(x), error(x), min(x), max(x)    over the seeds; `error`: of the mean
    high(x), low(x), first(x), last(x)            over the labels
    growth(x)                         each row divided by the row before it
    min(x, y), max(x, y), abs(x), sqrt(x), ranks(x, y)   elementwise; `ranks`: Spearman's correlation

`+ - * / **`, comparisons, `and`, `or` and `not` work elementwise. Nothing else is allowed: an expression
comes from a file and is never executed as Python. All numbers are floats, so no power is large; division by
zero gives infinity or a number that is not defined, for which no comparison holds.
"""

import ast
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, quote, reason_of, unknown
from polyformer.core.parsing import parse_expression

Array = np.ndarray[Any, Any]
Lookup = Callable[[str, tuple[Any, ...]], Array]
"""A function from a metric's name and labels (a slice for several) to numbers; the last axis is the seed."""

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.USub: operator.neg,
    ast.Not: np.logical_not,
    ast.And: np.logical_and,
    ast.Or: np.logical_or,
}


def ranks(x: Array, y: Array) -> Array:
    """Return Spearman's rank correlation over the labels, for each seed."""
    from scipy.stats import spearmanr

    columns = [spearmanr(a, b)[0] for a, b in zip(np.atleast_2d(x.T), np.atleast_2d(y.T))]
    return np.array(columns)


def reduction(over_seeds: Callable[..., Any], pairwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reduces one array over its seeds, or several arrays elementwise."""

    def reduce(first: Array, *others: Array) -> Array:
        if not others:
            return over_seeds(first, axis=-1)
        for other in others:
            first = pairwise(first, other)
        return first

    return reduce


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mean": lambda x: np.mean(x, axis=-1),
    "median": lambda x: np.median(x, axis=-1),
    "std": lambda x: np.std(x, axis=-1, ddof=1) if x.shape[-1] > 1 else np.zeros(x.shape[:-1]),
    "error": lambda x: FUNCTIONS["std"](x) / np.sqrt(x.shape[-1]),
    "min": reduction(np.min, np.minimum),
    "max": reduction(np.max, np.maximum),
    "high": lambda x: np.max(x, axis=0),
    "low": lambda x: np.min(x, axis=0),
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "growth": lambda x: x[1:] / x[:-1],
    "abs": lambda x: np.abs(x),  # numpy would write into a second argument
    "sqrt": lambda x: np.sqrt(x),
    "ranks": ranks,
}


def evaluate(text: str, lookup: Lookup, defined: Mapping[str, Any]) -> Any:
    """Return the value of an expression.

    Args:
        text: the expression.
        lookup: gives the numbers of a metric.
        defined: values that may be used by name.

    Raises:
        InputError: the expression is not understood or cannot be computed, or a name in it is unknown.
        KeyError: a cell has not been measured (raised by `lookup`).
    """
    tree = parse_expression(text, quote(text), "an expression such as loss[a] < loss[b]")
    try:
        with np.errstate(all="ignore"):
            return _Evaluation(text, lookup, defined).value(tree)
    except InputError:
        raise
    except (TypeError, ValueError, IndexError, OverflowError) as error:  # of numpy, and of labels and numbers
        raise InputError(f"{quote(text)}: cannot be computed ({reason_of(error)})") from error


def references(text: str, defined: Collection[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the metrics of an expression with their labels (a slice for several), in any order.

    Args:
        text: the expression.
        defined: names that are no metrics.

    Raises:
        InputError: the expression is not understood.
    """
    parts = _Evaluation(text, _nothing, {})
    nodes: list[ast.AST] = [parse_expression(text, quote(text), "an expression such as loss[a] < loss[b]")]
    while nodes:
        match node := nodes.pop():
            case ast.Subscript(metric, index):
                yield parts.dotted(metric), parts.labels(index)
            case ast.Name(name) if name in defined:
                continue
            case ast.Name() | ast.Attribute():
                yield parts.dotted(node), ()
            case ast.Call(ast.Name(), arguments, []):
                nodes += arguments
            case _:
                nodes += ast.iter_child_nodes(node)


def _nothing(metric: str, labels: tuple[Any, ...]) -> Array:
    raise KeyError(metric)


class _Evaluation:
    def __init__(self, text: str, lookup: Lookup, defined: Mapping[str, Any]):
        self.text, self.lookup, self.defined = text, lookup, defined

    def value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() as number):
                return np.float64(number)
            case ast.BinOp(left, symbol, right) if type(symbol) in OPERATORS:
                return OPERATORS[type(symbol)](self.value(left), self.value(right))
            case ast.UnaryOp(symbol, operand) if type(symbol) in OPERATORS:
                return OPERATORS[type(symbol)](self.value(operand))
            case ast.BoolOp(symbol, values):
                return self.chain([self.value(part) for part in values], OPERATORS[type(symbol)])
            case ast.Compare(left, symbols, others):
                sides = [self.value(side) for side in (left, *others)]
                pairs = zip(symbols, sides, sides[1:])
                return self.chain([OPERATORS[type(symbol)](a, b) for symbol, a, b in pairs], np.logical_and)
            case ast.Call(ast.Name(name), arguments, []):
                if name not in FUNCTIONS:
                    raise unknown("function", name, FUNCTIONS)
                return FUNCTIONS[name](*(np.asarray(self.value(part)) for part in arguments))
            case ast.Subscript(metric, index):
                return self.lookup(self.dotted(metric), self.labels(index))
            case ast.Name(name) if name in self.defined:
                return self.defined[name]
            case ast.Name() | ast.Attribute():
                return self.lookup(self.dotted(node), ())
        raise InputError(f"{quote(self.text)}: {quote(ast.unparse(node))} is not allowed in an expression")

    def chain(self, values: list[Any], join: Callable[..., Any]) -> Any:
        result = values[0]
        for value in values[1:]:
            result = join(result, value)
        return result

    def dotted(self, node: ast.AST) -> str:
        match node:
            case ast.Name(name):
                return name
            case ast.Attribute(value, name):
                return f"{self.dotted(value)}.{name}"
        raise InputError(f"{quote(self.text)}: expected a metric before the bracket")

    def labels(self, index: ast.AST) -> tuple[Any, ...]:
        return tuple(map(self.label, index.elts if isinstance(index, ast.Tuple) else [index]))

    def label(self, node: ast.AST) -> Any:
        match node:
            case ast.Slice(lower, upper, None):
                return slice(lower and self.label(lower), upper and self.label(upper))
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return name
        raise InputError(f"{quote(self.text)}: expected labels in the bracket, with quotes around symbols")
