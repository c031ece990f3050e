"""The effect of score functions, pair by pair, which no table of distances can represent.

A page adds it to q . k scale and the terms by distance. The values are stored for the pairs that the pattern
allows, in order: head after head, query after query, key after key.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.score_steps import steps_of
from polyformer.cli.plots.explorer.calls import MeasuredCall
from polyformer.cli.plots.explorer.exact_weights import tiles


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A step of a function: the term that it adds to the scores of the queries `rows`, None for all."""

    name: str
    rows: Tensor | None
    values: np.ndarray


def changes(site: MeasuredCall) -> Iterator[Change]:
    """Yield every step of the site's score functions; queries with separate projections come last."""
    own, projected = site.call.request, site.call.projected
    assert own is not None
    if projected is None:
        yield from _of_rows(own, None)
        return
    rows, request = projected[0].cpu(), projected[1]
    others = torch.ones(own.context.q_len, dtype=torch.bool)
    others[rows] = False
    yield from _of_rows(own, others.nonzero().flatten())
    for change in _of_rows(request, None):
        yield dataclasses.replace(change, rows=rows)


def numbers(site: MeasuredCall) -> int:
    """Return the largest number of values of all steps."""
    own, projected = site.call.request, site.call.projected
    assert own is not None
    assert site.allowed is not None
    total = len([*steps_of(own.score_mod)]) * site.allowed.pairs(site.shape[0])
    if projected is not None:
        total += len([*steps_of(projected[1].score_mod)]) * len(projected[0]) * site.shape[0] * site.shape[2]
    return total


def _of_rows(request: Request, rows: Tensor | None) -> Iterator[Change]:
    """Yield the steps for some queries of a request."""
    names = [name for name, _ in steps_of(request.score_mod)]
    if not names:
        return
    heads = request.q.shape[1]
    parts: list[list[list[Tensor]]] = [[[] for _ in range(heads)] for _ in names]
    for tile in tiles(request):
        allowed = tile.allowed.expand(heads, -1, -1).cpu()
        if rows is not None:
            inside = torch.isin(torch.arange(tile.start, tile.stop), rows)
            allowed = allowed & inside.view(1, -1, 1)
        for collected, change in zip(parts, tile.changes):
            for head, of_head in enumerate(collected):
                of_head.append(change[head].cpu()[allowed[head]])
    for name, collected in zip(names, parts):
        yield Change(name, rows, torch.cat([part for of_head in collected for part in of_head]).numpy())
