"""The data from which a page computes weights: queries and keys, as precise as possible; or the weights."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.attention.functional.backends.definition import tiles
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.score_steps import steps_of
from polyformer.cli.plots.explorer.calls import MeasuredCall
from polyformer.cli.plots.explorer.page import Buffers

PRECISIONS = {"float32": 4, "float16": 2, "int8": 1}
"""The bytes per number of q and k; int8 has a scale for each vector."""


def size(site: MeasuredCall, precision: str) -> int:
    """Return the bytes of a site's detail."""
    heads, queries, keys = site.shape
    if site.call.request is None:
        return 2 * heads * queries * keys
    bytes_each = PRECISIONS[precision]
    total = 4 * heads * queries + max(2, bytes_each) * numbers(site)
    for _, vectors in _vectors(site):
        *count, width = vectors.shape
        total += int(np.prod(count)) * (width * bytes_each + 4 * (precision == "int8"))
    return total


def planned(sites: Sequence[MeasuredCall], budget: int) -> tuple[str, list[int]]:
    """Return the finest precision in which the details of all sites take at most `budget` bytes, and these
    sites.

    If even the coarsest precision takes more, the sites are the most that fit, evenly spread.
    """
    for precision in PRECISIONS:
        if sum(size(site, precision) for site in sites) <= budget:
            return precision, list(range(len(sites)))
    for count in range(len(sites) - 1, 0, -1):
        picked = [i * len(sites) // count for i in range(count)]
        if sum(size(sites[i], precision) for i in picked) <= budget:
            return precision, picked
    return precision, []


def written(site: MeasuredCall, precision: str, buffers: Buffers) -> dict[str, Any]:
    """Return the site's detail, with its arrays in `buffers`."""
    if site.call.request is None:
        return {"kind": "weights", "values": buffers.add(site.weights().half().numpy())}
    request, *_ = _requests(site)
    assert site.lse is not None
    lse = np.where(np.isneginf(site.lse), np.float32(-1e30), site.lse).astype(np.float32)
    relative, detail, bytes_each = request.relative, dict[str, Any](), PRECISIONS[precision]
    for name, vectors in _vectors(site):
        values, scales = rounded(vectors, precision)
        detail[name] = buffers.add(values)
        detail[f"{name}_scales"] = None if scales is None else buffers.add(scales)
    bias = None if relative is None else relative.bias
    rows = None if site.call.projected is None else site.call.projected[0]
    return {
        "kind": "pairs",
        **detail,
        "scale": request.scale,
        "lse": buffers.add(lse),
        "bias": None if bias is None else buffers.add(bias.detach().float().cpu().numpy()),
        "first": 0 if relative is None else relative.first,
        "projected": None if rows is None else buffers.add(rows.int().cpu().numpy()),
        "changes": [
            {
                "name": change.name,
                "rows": None if change.rows is None else buffers.add(change.rows.int().numpy()),
                "values": buffers.add(change.values.astype("float32" if bytes_each == 4 else "float16")),
            }
            for change in changes(site)
        ],
    }


def _requests(site: MeasuredCall) -> list[Request]:
    """Return the requests of the call: its own, and the request of queries with separate projections."""
    own, projected = site.call.request, site.call.projected
    return [] if own is None else [own] if projected is None else [own, projected[1]]


def _vectors(site: MeasuredCall) -> Iterator[tuple[str, Tensor]]:
    """Yield the vectors of the dot products [H, T, D], by their name on the page.

    These are queries and keys, and vectors of distances with the vectors that are multiplied by them, unless
    these are the queries and keys themselves.
    """
    request, *others = _requests(site)
    q = request.q[0]
    if site.call.projected is not None:
        q = q.clone()
        q[:, site.call.projected[0]] = others[0].q[0].to(q.dtype)
        yield "projected_k", others[0].k[0]
    yield "q", q
    yield "k", request.k[0]
    if request.relative is None:
        return
    for name in ("position_keys", "position_queries"):
        table = getattr(request.relative, name)
        if table is not None:
            yield name, table
    if request.relative.position_keys is not None and request.relative.content is not None:
        yield "content", request.relative.content[0]


def rounded(x: Tensor, precision: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return x [H, T, D] at the precision, and for int8 the scale [H, T] of each vector."""
    values = x.detach().float().cpu().numpy()
    if precision != "int8":
        return values.astype(precision), None
    scales = np.maximum(np.abs(values).max(-1), 1e-12) / 127
    return np.rint(values / scales[..., None]).astype(np.int8), scales.astype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """A step of a score function: the term that it adds to the scores of the queries `rows`, None for all.

    No table of distances can represent it. The values are stored for the pairs that the pattern allows, in
    order: head after head, query after query, key after key.
    """

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
