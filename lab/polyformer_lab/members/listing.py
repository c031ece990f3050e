"""The rows of the table of members: every registered member, with options that fit rows of n tokens."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.nn.depth import DepthConfig
from polyformer.nn.memory import MemoryConfig

Table = Literal["decoder", "encoder", "image"]
Family = Literal["mechanism", "pattern", "position", "memory", "depth"]

DENSE, CONTROL = "softmax", "Window(8)"
SEGMENTS = 4
"""The number of segments in which a decoder with a memory reads a row."""

OPTIONS: dict[Family, dict[str, tuple[str, ...]]] = {
    "mechanism": {
        "performer": ("performer(features=64)",),
        "rfa": ("rfa(features=64)", "rfa(features=64, gated=True)"),
        "linformer": ("linformer(max_length={n}, k=32)",),
        "lsh": ("lsh(rounds=4, buckets=8, window=16)",),
        "memory_compressed": ("memory_compressed",),
        "adaptive_span": ("adaptive_span(max_span={n}, initial=0.5)",),
        "dynamic_span": ("dynamic_span(max_span={n})",),
        "routing": ("routing(clusters=8, window=16, local_window=16)",),
        "sinkhorn": ("sinkhorn(block_size=16, max_length={n})",),
        "sort_cut": ("sort_cut(block_size=16, max_length={n}, cut=2)",),
        "svd": ("svd(rank=32)",),
        "moba": ("moba(block_size=8, top_k=4)",),
        "nsa": ("nsa(block_size=8, top_k=1, window=8)",),
        "top_blocks": ("top_blocks(block_size=8, keep=4, first=1, local=2)",),
        "alternate": (
            "alternate(mechanisms=[Window(8), softmax])",
            "alternate(mechanisms=[BlockWindow(16), memory_compressed])",
        ),
    },
    "pattern": {
        "Full": (),  # `softmax`
        "Window": (CONTROL, "Window(8, 8, 4)"),
        "BlockWindow": ("BlockWindow(16)",),
        "Blockwise": ("PerHead([Blockwise({half}, [0, 1]), Blockwise({half}, [1, 0])])",),
        "ETC": ("ETC(8, 8)",),
        "Summary": ("PerLayer([Window(16), Summary(16, 2)])",),
        "Fixed": ("PerHead([Fixed(16, 2), Summary(16, 2)])",),
        "GlobalEnd": ("Window(8) | GlobalEnd(4)",),
        "Global": ("Window(8) | Global(4)",),
        "Local1D": ("Local1D(16, 16)",),
        "Links": ("Links({half}, [[0], [0, 1]])",),
        "Marked": ("Window(8) | Marked()",),
        "PerHead": ("PerHead([Window(8), Full()])",),
        "PerLayer": ("PerLayer([Window(8), Full()])",),
        "Random": ("Window(8) | Random(2, 8, 0)", "Window(8) | Global(4) | Random(2, 8, 0)"),
        "Whole": ("Window(8) | Whole({n})",),
        "Strided": ("Window({root}, 0) | Strided({root})", "PerLayer([Window({root}), Strided({root})])"),
    },
    "position": {
        "axial": ("axial(grid=[8, {eighth}])",),
        "concatenated": ("concatenated(width=16)",),
        "etc_labels": ("etc_labels(max_distance=12)",),
        "relation_labels": ("relation_labels(num_labels=33)",),
        "relation_bias": ("relation_bias(num_labels=33)",),
        "rope": (),  # the positions of `softmax`
    },
    "memory": {
        "none": ("none",),
        "recurrent": ("recurrent(length={n})",),
        "compressive": ("compressive(length={quarter}, compressed_length={quarter}, rate=3)",),
        "sinks": ("sinks(first=4, length=28)",),
        "memorizing": ("memorizing(length={quarter}, store={n}, neighbours=16)",),
    },
    "depth": {"fixed": ()},  # fixed: `softmax`
}
"""The expressions of the rows by kind; a kind that is missing has one row, its own name or first example."""

GRID = "grid(shape=[{side}, {side}])"
IMAGES: tuple[tuple[Family, str], ...] = (
    ("mechanism", DENSE),
    ("pattern", "Window(2, 0)"),
    ("pattern", "Local1D(28, 28)"),
    ("pattern", "Local2D([{side}, {side}], [2, 7], [3, 3, 3])"),
    ("pattern", "Neighbourhood([{side}, {side}], 7)"),
    ("position", "learned"),
    ("position", "none"),
)
"""Rows of the table of images, whose models have the positions `grid` by default."""

ABSENT = {
    "Aligned": "between a target and its source: the rows are single stacks",
    "SourceSpans": "between a target and its source: the rows are single stacks",
    "WaitK": "between a target and its source: the rows are single stacks",
    "Causal": "what a decoder forbids in any case: a decoder's row would be dense, an encoder is not one",
    "Padding": "what every call forbids in any case: the row would be dense",
    "Documents": "what every call forbids in any case: the row would be dense",
    "Local2D": "blocks of an image: in the table of images",
    "Neighbourhood": "places of an image: in the table of images",
    "grid": "rows and columns of an image: in the table of images, of all of its rows but two",
}
"""Members without a row of text, and the reason."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: a model with the member `expression` of `family`."""

    table: Table
    family: Family
    expression: str

    @property
    def name(self) -> str:
        """The name of the row in messages."""
        return f"{self.table} {self.family} {self.expression}"

    @property
    def label(self) -> str:
        """The name without parentheses, braces and commas, as a label of a grid."""
        return re.sub(r"[^\w=|.]+", " ", self.name).strip()

    @property
    def asks(self) -> str:
        """The kind of question by which the row is judged."""
        if self.table == "image":
            return "pixel"
        return "back" if self.family == "position" else "recall"

    @property
    def segments(self) -> int:
        """The number of calls in which a row of tokens is read."""
        return SEGMENTS if self.family == "memory" else 1

    @property
    def supports_recurrence(self) -> bool:
        """Return whether a segment is read with the state of the segment before; the memory `none` forgets
        it.

        A decoder without a memory would keep all keys and values in its state, which is dense attention.
        """
        return self.segments > 1 and self.expression != "none"

    def options(self, length: int) -> dict[str, Any]:
        """Return the options of `create_model` for this member and rows of `length` tokens."""
        text = fitted(self.expression, length)
        if self.family == "memory":
            return {"memory": text, "position": "transformer_xl"}
        option = "attention" if self.family in ("mechanism", "pattern") else self.family
        position = fitted(GRID, length) if self.table == "image" else "rope"
        return {"position": position, option: text}


def fitted(expression: str, length: int) -> str:
    """Return the expression with the sizes for `length` instead of their names."""
    root = math.isqrt(length)
    return expression.format(
        n=length, half=length // 2, quarter=length // 4, eighth=length // 8, root=root, side=root
    )


def every_row() -> list[Row]:
    """Return all rows: the rows of text for a decoder and for an encoder, then the rows of images.

    Only a decoder has a memory. A member that cannot be used in the row's table raises an error when its
    model is built (`refusal`).
    """
    tables: tuple[Table, Table] = ("decoder", "encoder")
    text = [
        Row(table, family, expression)
        for table in tables
        for family, expression in _expressions()
        if family != "memory" or table == "decoder"
    ]
    return text + [Row("image", family, expression) for family, expression in IMAGES]


def _expressions() -> Iterator[tuple[Family, str]]:
    families: dict[Family, dict[str, str]] = {
        "mechanism": {kind: kind for kind in MechanismConfig.kinds},
        "pattern": {name: cls.examples()[0].to_text() for name, cls in Pattern.registry.items()},
        "position": {kind: kind for kind in PositionConfig.kinds},
        "memory": {kind: kind for kind in MemoryConfig.kinds},
        "depth": {kind: kind for kind in DepthConfig.kinds},
    }
    for family, defaults in families.items():
        chosen = OPTIONS[family]
        for kind, default in defaults.items():
            for expression in () if kind in ABSENT else chosen.get(kind, (default,)):
                yield family, expression


def references(row: Row) -> tuple[Row, Row]:
    """Return the rows that a row is compared with: dense attention, and a control without the answer."""
    if row.table == "image":
        return Row("image", "mechanism", DENSE), Row("image", "pattern", "Window(2, 0)")
    if row.family == "memory":
        return Row(row.table, "position", "transformer_xl"), Row(row.table, "memory", "none")
    dense = Row(row.table, "mechanism", DENSE)
    if row.family == "position":
        return dense, Row(row.table, "position", "none")
    return dense, Row(row.table, "pattern", CONTROL)
