"""The spans that the heads of a model with adaptive spans have learned."""

import statistics
from collections.abc import Iterator

from polyformer.attention.mechanisms.spans import spans
from polyformer_lab.cells import Cell, Row, measurement


@measurement("layer")
def learned_spans(cell: Cell) -> Iterator[Row]:
    """Yield the mean and the longest span of each layer, in tokens."""
    for number, own in enumerate(spans(cell.fitted.model).values(), 1):
        yield {"layer": number, "span": statistics.fmean(own), "longest": max(own)}
