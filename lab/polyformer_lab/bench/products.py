"""Matrix products at the sizes of models: ours, which selects a library of torch, compared with plain
torch.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.ops.linear import linear
from polyformer_lab.bench.rows import OURS, Bench, Case, Make, Row
from polyformer_lab.bench.running import runner

Product = Callable[[Tensor, Tensor], Tensor]

NAMES = {"forward": "forward", "input": "gradient of the input", "weight": "gradient of the weight"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductsBench(Bench):
    """Square products, products to four times the width and back, and to the vocabulary, by number of
    rows.
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


run = runner(ProductsBench)
