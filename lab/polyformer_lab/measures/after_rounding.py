"""Losses of a model with feed-forward matrices that are rounded after training."""

import copy
from collections.abc import Iterator, Sequence

from polyformer.nn.feedforward.feedforward import Dense
from polyformer_lab.cells import Cell, Row, measurement


@measurement("weights")
def after_rounding(cell: Cell, bits: Sequence[int] = ()) -> Iterator[Row]:
    """Yield the validation loss as trained, and after the feed-forward matrices are rounded to `bits`."""
    from polyformer_lab.rounded import with_rounding  # registers a member, for these studies only

    fitted = cell.fitted
    rows = fitted.task.held_out(fitted.splits.validation or [])
    yield {"weights": "as trained", "loss": fitted.scores["validation"]["loss"]}
    for number in bits:
        model = copy.deepcopy(fitted.model).eval()
        for layer in [module for module in model.modules() if isinstance(module, Dense)]:
            with_rounding(layer, number)
        yield {"weights": f"{number} bits", "loss": fitted.task.measure(model, rows)["loss"]}
