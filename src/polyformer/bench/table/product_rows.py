"""Products of the sizes that models have: ours, which chooses among torch's libraries, beside plain torch."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.bench.table.row import OURS, Asked, Case, Make, Row
from polyformer.ops.linear import linear

Product = Callable[[Tensor, Tensor], Tensor]

ROW_COUNTS = 1, 8, 64, 512, 1024
WIDTHS = 128, 256, 512, 768, 1024
VOCABULARY = 768, 50257
NAMES = {"forward": "forward", "input": "gradient of the input", "weight": "gradient of the weight"}


def _sizes(quick: bool) -> Iterator[tuple[int, int, int]]:
    """Rows, inputs, outputs: square, to four times the width and back, to the vocabulary."""
    if quick:
        yield from ((1, 16, 64), (8, 64, 16))
        return
    for rows in ROW_COUNTS:
        for width in WIDTHS:
            yield from ((rows, width, width), (rows, width, 4 * width), (rows, 4 * width, width))
        yield rows, *VOCABULARY


def _cases(which: str) -> Callable[[bool], Iterator[Case]]:
    def cases(quick: bool) -> Iterator[Case]:
        for rows, inputs, outputs in _sizes(quick):
            generator = torch.Generator().manual_seed(0)
            x, weight, grad = (
                torch.randn(shape, generator=generator)
                for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
            )
            libraries: dict[str, Product] = {"torch": F.linear, OURS: linear}
            contenders = {name: _make(which, call, x, weight, grad) for name, call in libraries.items()}
            yield Case(contenders, f"{rows} x {inputs} x {outputs}")

    return cases


def _make(which: str, product: Product, x: Tensor, weight: Tensor, grad: Tensor) -> Make:
    """One of the three products of a linear layer, as autograd asks for it."""

    def make() -> Callable[[], object]:
        if which == "forward":
            return torch.no_grad()(lambda: product(x, weight))
        leaf = (x if which == "input" else weight).detach().requires_grad_()
        y = product(leaf, weight) if which == "input" else product(x, leaf)
        return lambda: torch.autograd.grad(y, leaf, grad, retain_graph=True)

    return make


ROWS = tuple(
    Row(
        f"products-{which}",
        f"products, {ROW_COUNTS[0]} to {ROW_COUNTS[-1]} rows, {WIDTHS[0]} to {WIDTHS[-1]} wide: {name}",
        _cases(which),
        (Asked("torch", 0.97),),
        repeats=7,
    )
    for which, name in NAMES.items()
)
