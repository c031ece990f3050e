"""Limits of input sizes, and ranges of numbers in the types of dataclasses.

Limits are far above the needs of honest files and users, and low enough that a small file, or a number on the
command line, cannot exhaust memory or time. Each is checked before anything of that size is allocated.
SECURITY.md shows `LIMITS` as a table.

A range is stated by a type: `width: PositiveInt = 64`, `base: Annotated[float, Gt(1)]`. The metadata of such
a type are constraints of annotated-types (`Ge`, `Gt`, `Le`, `Lt`, `Interval`) and perhaps a `Wording`. A
field has at most one range, which holds for every number in it, as in `tuple[PositiveInt, ...] | None`.
Infinity and NaN are in no range.
"""

import dataclasses
import functools
import math
import numbers
import typing
from collections import ChainMap
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from annotated_types import Ge, Gt, Interval, Le, Lt

from polyformer.core.errors import MESSAGE, QUOTED, InputError, quote

JSON_BYTES = 2**28  # vocabularies are large
YAML_BYTES, EXPRESSION_BYTES = 2**18, 2**16
DEPTH = 64
EXPRESSION_DEPTH = 2 * DEPTH
PARTS = 1024
INTEGER_BITS = 64

SIZE = 2**24
"""The limit of a width, a vocabulary, a number of positions, heads, ...: products of a few sizes fit into 64
bits.
"""

LAYERS = 4096
PATTERN_NUMBER = 2**31 - 1
"""Chosen so that the product of two also fits into 64 bits."""

NEW_TOKENS = 2**20
"""The most new tokens of a text: at ten tokens per second they take more than a day."""

RESERVED = 2**14
"""The most tokens for which a KV cache reserves memory at once; beyond that it grows with the tokens."""

TEXTS = 4096
"""Texts generated at once for one input: beams or samples."""

COUNT = 2**63 - 1
"""The limit of a number that only ends a loop, such as training steps, and of seeds."""

CELLS = 2**14
"""The most runs of an experiment: in a YAML text of 256 KiB the axes of a grid can multiply to any number."""

LINE = 2**26
FILE_OF_A_LABEL = 2**24
PIXELS, IMAGE_BYTES, IMAGE_SIDE = 2**26, 2**28, 4096
LABELS = 2**26
"""The most labels in an IDX file. They are read at once, a byte each; MNIST has a thousandth of this."""

EXPANSION, EXPANDED = 200, 2**26
"""Text compresses to a fifth or a tenth; data that is 200 times its file, and large, is a
decompression bomb.
"""

VECTOR_WIDTH, VECTOR_WORD = 2**16, 2**12


def _size(count: int) -> str:
    """Return a number of bytes in KiB or MiB."""
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


LIMITS = {
    "a JSON file": _size(JSON_BYTES),
    "a YAML text": _size(YAML_BYTES),
    "an expression": _size(EXPRESSION_BYTES),
    "nesting in JSON and YAML": f"{DEPTH} levels",
    "nesting in an expression": f"{EXPRESSION_DEPTH} nodes",
    "calls and names of layers in `polyformer_attention` of a config.json": f"{PARTS:,}",
    "an integer in a file": f"{INTEGER_BITS} bits",
    "a float in a file": "finite",
    "a key in a JSON object": "once",
    "a size in a configuration (positions, widths, vocabulary)": f"{SIZE:,}",
    "layers of a stack, also in a GGUF file": f"{LAYERS:,}",
    "a number in a pattern": f"{PATTERN_NUMBER:,}",
    "new tokens of a text (`--max-new-tokens`, `--generate`, `GenerationConfig`)": f"{NEW_TOKENS:,}",
    "beams or samples per input": f"{TEXTS:,}",
    "any other size on the command line (`--lengths`, `--num-beams`, `--batch-tokens`, ...)": f"{SIZE:,}",
    "runs of an experiment (the labels of all axes times the seeds)": f"{CELLS:,}",
    "a value quoted in a message": f"{QUOTED} characters",
    "a message": f"{MESSAGE:,} characters",
    "a line of text": f"{LINE:,} characters",
    "a text in a folder of labels": f"{FILE_OF_A_LABEL:,} characters",
    "the file of an image": _size(IMAGE_BYTES),
    "pixels of an image": f"{PIXELS:,}",
    "labels of an IDX file": f"{LABELS:,}",
    "decompressed data of a gzip, zstd, npz or Parquet file": (
        f"{EXPANSION} times the file, or {_size(EXPANDED)} if larger"
    ),
    "dimensions of a word vector": f"{VECTOR_WIDTH:,}",
}
"""The limited sizes and their limits."""


def limit_table() -> str:
    """Return `LIMITS` as a Markdown table."""
    return "\n".join(
        ["| input | limit |", "|---|---|", *(f"| {what} | {most} |" for what, most in LIMITS.items())]
    )


SEEDS = ("seed", "hash_seed")  # integers that are not sizes


@dataclasses.dataclass(frozen=True)
class Wording:
    """Words for the error of a range: "expected `noun` in [0, 1), got 2; `fix`"."""

    noun: str = "a number"
    fix: str = ""


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
FiniteFloat = Annotated[float, Interval(gt=-math.inf, lt=math.inf)]
Probability = Annotated[float, Interval(ge=0, lt=1), Wording("a probability")]
UnitFloat = Annotated[float, Interval(ge=0, le=1)]
Share = Annotated[UnitFloat, Wording("a share")]
PositiveShare = Annotated[float, Interval(gt=0, le=1), Wording("a share")]


class Range:
    """The numbers that satisfy the constraints in `metadata`; `int` among them counts in whole numbers.

    of_several: whether a tuple of such numbers is allowed, too.
    """

    def __init__(self, metadata: tuple[Any, ...], of_several: bool = False) -> None:
        self.low, self.high = -math.inf, math.inf
        self.includes_low, self.includes_high = False, False
        self.whole, self.of_several = int in metadata, of_several
        # The last: it belongs to the outermost `Annotated`.
        self.wording = next((item for item in reversed(metadata) if isinstance(item, Wording)), Wording())
        for constraint in _constraints(metadata):
            match constraint:
                case Ge():
                    self.low, self.includes_low = constraint.ge, True
                case Gt():
                    self.low = constraint.gt
                case Le():
                    self.high, self.includes_high = constraint.le, True
                case Lt():
                    self.high = constraint.lt
        low, high = self.low, self.high
        # Compiled once, as a configuration of a large model has hundreds of numbers.
        self.contains: Callable[[Any], bool] = {
            (False, False): lambda value: low < value < high,
            (False, True): lambda value: low < value <= high,
            (True, False): lambda value: low <= value < high,
            (True, True): lambda value: low <= value <= high,
        }[self.includes_low, self.includes_high]

    def __str__(self) -> str:
        """Return the range in words: "1 or more", "a number above 0", "a probability in [0, 1)"."""
        noun, low, high = self.wording.noun, self.low, self.high
        if (low, high) == (-math.inf, math.inf):
            return "a finite number"
        if high == math.inf:
            return f"{low} or more" if self.includes_low else f"{noun} above {low}"
        if low == -math.inf:
            return f"at most {high}" if self.includes_high else f"{noun} below {high}"
        if self.includes_low and self.includes_high:
            return f"{low} to {high}" if self.whole else f"{noun} from {low} to {high}"
        return f"{noun} in {'(['[self.includes_low]}{low}, {high}{')]'[self.includes_high]}"

    def check(self, name: str, value: Any) -> None:
        """Raise `InputError` unless every number in `value`, called `name` by the user, is in the range."""
        if isinstance(value, tuple | list):
            for index, item in enumerate(value):
                self.check(f"{name}[{index}]", item)
        elif value is not None and not (isinstance(value, numbers.Real) and self.contains(value)):
            fix = f"; {self.wording.fix}" if self.wording.fix else ""
            raise InputError(f"{name}: expected {self}, got {quote(value)}{fix}")


def check_range(name: str, value: Any, *constraints: Any) -> None:
    """Raise `InputError` unless every number in `value` satisfies the constraints, such as `Ge(1)`."""
    Range(constraints).check(name, value)


def check_ranges(config: Any, prefix: str = "") -> None:
    """Raise `InputError` for a field of a dataclass outside its range; `prefix` precedes the field's name."""
    for name, interval in ranges(type(config)).items():
        value = getattr(config, name)
        try:
            inside = value is None or interval.contains(value)
        except (TypeError, RuntimeError):  # several numbers, or none; a tensor of several
            inside = False
        if inside:
            continue
        interval.check(prefix + name, value)
        if not interval.of_several and isinstance(value, tuple | list):
            raise InputError(f"{prefix}{name}: expected {interval}, got {quote(value)}")


@functools.cache
def ranges(cls: type) -> dict[str, Range]:
    """Return the ranges of a dataclass's fields by their names.

    A subclass that declares a field again inherits its range, unless the new type has another range.
    """
    inherited = [ranges(base) for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    hints = typing.get_type_hints(cls, include_extras=True)
    metadata = {field.name: {*_metadata(hints[field.name])} for field in dataclasses.fields(cls)}
    assert all(len(each) <= 1 for each in metadata.values()), f"{cls.__name__}: two ranges of a field"
    own = {name: Range(items, _has_tuple(hints[name])) for name, each in metadata.items() for items in each}
    return dict(ChainMap(own, *inherited))


def check_sizes(config: Any) -> None:
    """Raise `InputError` for an integer above `SIZE` in any part of a configuration, seeds apart."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int) and item > SIZE and field.name not in SEEDS:
                check_range(field.name, item, Le(SIZE))
            if dataclasses.is_dataclass(item):
                check_sizes(item)


def _constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the constraints in `metadata`; an `Interval` stands for several."""
    for item in metadata:
        yield from item if isinstance(item, Interval) else (item,)


def _has_tuple(hint: Any) -> bool:
    """Return whether a type allows a tuple of values."""
    return typing.get_origin(hint) is tuple or any(map(_has_tuple, typing.get_args(hint)))


def _metadata(hint: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the metadata with a constraint in `hint`."""
    if any(isinstance(item, Ge | Gt | Le | Lt) for item in _constraints(getattr(hint, "__metadata__", ()))):
        yield hint.__origin__, *hint.__metadata__
    for part in typing.get_args(hint):
        yield from _metadata(part)
