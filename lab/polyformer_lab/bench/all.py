"""The project's own table (all), and matrix products (products), which the table has rows of."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ops.linear import linear
from polyformer_lab.bench.attention import AttentionBench
from polyformer_lab.bench.generation import LIBRARIES, GenerationBench
from polyformer_lab.bench.models import ModelsBench
from polyformer_lab.bench.passes import FamiliesBench, TrainingBench
from polyformer_lab.bench.rows import INSTRUCTIONS, OURS, Bench, Case, Contest, Make, Row, check_names
from polyformer_lab.bench.running import runner

Product = Callable[[Tensor, Tensor], Tensor]

NAMES = {"forward": "forward", "input": "gradient of the input", "weight": "gradient of the weight"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsBench(Bench):
    """Matrix products at the sizes of models: ours, which selects a library of torch, and plain torch.

    Square products, products to four times the width and back, and to the vocabulary, by number of rows.
    """

    row_counts: tuple[int, ...] = (1, 8, 64, 512, 1024)
    widths: tuple[int, ...] = (128, 256, 512, 768, 1024)
    vocabulary: tuple[int, ...] = (768, 50257)  # its inputs and outputs; () omits it
    repeats: int = 7

    def rows(self) -> Iterator[Row]:
        """Yield the three products of a linear layer, each with the worst result of its sizes."""
        sizes = (
            f"{self.row_counts[0]} to {self.row_counts[-1]} rows, {self.widths[0]} to {self.widths[-1]} wide"
        )
        for which, name in NAMES.items():
            cases = functools.partial(self._cases, which)
            yield Row(
                f"products-{which}",
                f"products, {sizes}: {name}",
                cases,
                asked={(OURS, "torch"): 0.97},
                worst=True,
                repeats=self.repeats,
            )

    def _cases(self, which: str) -> Iterator[Case]:
        for rows in self.row_counts:
            shapes = [
                shape
                for width in self.widths
                for shape in ((width, width), (width, 4 * width), (4 * width, width))
            ]
            for inputs, outputs in [*shapes, *([self.vocabulary] if self.vocabulary else [])]:
                generator = torch.Generator().manual_seed(0)
                x, weight, grad = (
                    torch.randn(shape, generator=generator)
                    for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
                )
                libraries: dict[str, Product] = {"torch": F.linear, OURS: linear}
                contenders = {name: _make(which, call, x, weight, grad) for name, call in libraries.items()}
                yield Case(contenders, f"{rows} x {inputs} x {outputs}")


def _make(which: str, product: Product, x: Tensor, weight: Tensor, grad: Tensor) -> Make:
    """Return one of the three products of a linear layer, as autograd calls it."""

    def make() -> Callable[[], object]:
        if which == "forward":
            return torch.no_grad()(lambda: product(x, weight))
        leaf = (x if which == "input" else weight).detach().requires_grad_()
        y = product(leaf, weight) if which == "input" else product(x, leaf)
        return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)

    return make


run_products = runner(ProductsBench)


SMALL = {"layers": 1, "hidden_size": 12, "heads": 3, "vocab_size": 30}

BENCHES: dict[str, tuple[type[Bench], dict[str, Any], dict[str, Any]]] = {
    "attention": (
        AttentionBench,
        {"lengths": [8192], "memory": False, "repeats": 5},
        {"lengths": [256], "heads": 2, "width": 8},
    ),
    "families": (FamiliesBench, {"batches": 1}, {"layers": 1}),
    "generation": (
        GenerationBench,
        {"libraries": list(LIBRARIES), "beams": []},
        # A compiled model takes minutes to start.
        {"libraries": [n for n in LIBRARIES if n != "transformers-compiled"], "layers": 1, "new_tokens": 2},
    ),
    "models": (ModelsBench, {"repeats": 3}, {**SMALL, "length": 40, "window": 4, "block": 2, "random": 2}),
    "products": (ProductsBench, {}, {"row_counts": [1, 8], "widths": [16], "vocabulary": []}),
    "training": (TrainingBench, {}, {**SMALL, "batch": 2, "length": 8}),
}
"""Benches by name, with the settings that all rows share, and the settings of a quick run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed(Config):
    """A row of all.yaml, which describes the fields."""

    what: str
    bench: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    quick: dict[str, Any] = dataclasses.field(default_factory=dict)
    asked: dict[str, float] = dataclasses.field(default_factory=dict)
    narrow: dict[str, float] = dataclasses.field(default_factory=dict)

    def row(self, name: str, quick: bool) -> Row:
        """Return the row of its bench that has this name, or the only row."""
        bench, shared, sizes = BENCHES[self.bench]
        small = {**sizes, **self.quick, "repeats": 1} if quick else {}
        rows = {row.name: row for row in bench.from_dict({**shared, **self.settings, **small}).rows()}
        row = rows.get(name) or next(iter(rows.values()))
        cases, (asked, narrow) = row.cases, map(_contests, (self.asked, self.narrow))
        if not row.worst:  # the row's name contains the case
            row = dataclasses.replace(
                row, cases=lambda: (dataclasses.replace(each, name="") for each in cases())
            )
        return dataclasses.replace(row, name=name, what=self.what, asked=asked, narrow=narrow)


def _contests(asked: dict[str, float]) -> dict[Contest, float]:
    pairs = {pair.rpartition(" / "): ratio for pair, ratio in asked.items()}
    return {(ours or OURS, peer): ratio for (ours, _, peer), ratio in pairs.items()}


LIST = {
    name: Listed.from_dict(fields, name)
    for name, fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")).items()
}
"""The rows, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllBench(Bench):
    """The table by which the project measures itself, on this machine: ours and the usual alternatives.

    Every row is measured in a separate process, with all instructions of the processor and with AVX2 only,
    which represents the other kind of processor. With --out FILE.json the records are saved after every row:
    the same command resumes a stopped run, and repeats the rows that failed.

    Peers that are not installed are named and left out; pip install 'polyformer[peers]' has them all.
    """

    only: tuple[str, ...] = ()  # rows by name; by default all
    quick: bool = False  # tiny sizes, to test that it runs
    instruction_sets: tuple[str, ...] = tuple(INSTRUCTIONS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("row", self.only, LIST)
        if not self.instruction_sets:
            raise InputError(f"instruction_sets: expected some of {', '.join(INSTRUCTIONS)}, got none")

    def rows(self) -> Iterator[Row]:
        """Yield the rows of `LIST`."""
        for name in self.only or LIST:
            yield LIST[name].row(name, self.quick)


run_all = runner(AllBench)
