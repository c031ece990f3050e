"""The calls of attention that a model makes on one text, and the measurements of each.

Measurements are arrays in `Buffers`, one string of bytes, which the page reads without parsing numbers. The
attention matrix of any mechanism comes from `value_matrix`; tiles of exact weights are joined with a sink or
with other rows.
"""

import base64
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.attention.functional.backends.definition import WeightTile, tiles
from polyformer.attention.functional.request import Request
from polyformer.core.instrumentation import SINK, Mark, TokenRecord

ALIGNED = 8
"""The alignment of an array in bytes, so that a page can create a view of any type."""

TYPES = ("uint8", "int8", "int16", "int32", "float16", "float32")


class Buffers:
    """A collector of arrays; the results of `add` go into the page's JSON."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0  # bytes
        self.places: dict[tuple[str, bytes], int] = {}

    def add(self, array: np.ndarray) -> dict[str, Any]:
        """Return the array's offset, its type and its shape; equal arrays are stored once."""
        name = str(array.dtype)
        assert name in TYPES, name
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        key = name, hashlib.sha256(content).digest()
        if key not in self.places:
            self.places[key] = self.size
            padding = -len(content) % ALIGNED
            self.parts += [content, bytes(padding)]
            self.size += len(content) + padding
        return {"at": self.places[key], "dtype": name, "shape": list(array.shape)}

    def base64(self) -> str:
        """Return all bytes, in order."""
        return base64.b64encode(b"".join(self.parts)).decode()


def with_sink(ordinary: Iterator[WeightTile], sink: Tensor) -> Iterator[WeightTile]:
    """Yield the tiles with the share `sink` [H, Tq], float32, of each query's weights taken off the keys."""
    for tile in ordinary:
        keys = 1 - sink[:, tile.start : tile.stop].to(tile.weights.device)
        weights, lse = tile.weights * keys.unsqueeze(2), tile.lse - keys.log()
        yield dataclasses.replace(tile, weights=weights, lse=lse)


def with_rows(
    ordinary: Iterator[WeightTile], rows: Tensor, others: Iterator[WeightTile]
) -> Iterator[WeightTile]:
    """Yield the tiles of all queries, with the queries `rows` [G] replaced by `others`; all on the CPU."""
    parts = list(others)
    for tile in ordinary:
        inside = (rows >= tile.start) & (rows < tile.stop)
        if not inside.any():
            yield tile
            continue
        keys = max(int(part.columns.max()) + 1 for part in (*parts, tile) if len(part.columns))
        whole = _over(tile, keys)
        for part in parts:
            mine = inside[part.start : part.stop].nonzero().flatten()
            places, own = rows[part.start : part.stop][mine] - tile.start, _over(part, keys)
            for table, values in zip(whole, own):
                table[:, places] = values[:, mine]
        weights, allowed, lse = whole
        yield WeightTile(tile.start, tile.stop, torch.arange(keys), weights, allowed, lse)


def _over(tile: WeightTile, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return copies of weights and allowed pairs [H, T, keys] over all keys, and of the log-sum-exps."""
    heads, queries, _ = tile.weights.shape
    weights, allowed = torch.zeros(heads, queries, keys), torch.zeros(heads, queries, keys, dtype=torch.bool)
    columns = tile.columns.cpu()
    weights[:, :, columns] = tile.weights.cpu()
    allowed[:, :, columns] = tile.allowed.expand(heads, -1, -1).cpu()
    return weights, allowed, tile.lse.cpu().clone()


Mix = Callable[[Tensor], Tensor]
"""A function from values [1, Hkv, Tk, D] to outputs [1, H, Tq, D]."""


@torch.no_grad()
def value_matrix(mix: Mix, values: Tensor) -> Tensor:
    """Return the attention matrix A [H, Tq, Tk] of any mechanism, float32: its map from values to outputs.

        y = A v + c,  c = f(q, k, 0),  so  f(q, k, I) - c = A

    for every mechanism is affine in its values, for any function of queries and keys: hashing, clusters,
    random features, compressed keys. The columns of the identity are evaluated in groups of D. `values`
    [1, Hkv, Tk, D] determine shape and type.
    """
    length, width = values.shape[-2:]
    nothing = mix(torch.zeros_like(values))
    columns = []
    for start in range(0, length, width):
        part = torch.zeros_like(values)
        index = torch.arange(start, min(start + width, length), device=values.device)
        part[..., index, index - start] = 1
        columns.append((mix(part) - nothing)[0, ..., : len(index)])
    return torch.cat(columns, -1).float()


CELLS = 48
"""The most cells of a thumbnail in each direction."""


class Summaries:
    """The summaries of the heads of one call, [H, Tq, Tk] in total.

    `thumbnails` [H, R, C]: the greatest weight in each cell. `distance` [H, bins]: the share of all weight by
    distance, in bins of 0, 1, 2, 3 to 4, 5 to 8, ...; `edges` are the starts of the bins.
    """

    def __init__(self, heads: int, queries: int, keys: int, offset: int):
        self.queries, self.keys, self.offset = queries, keys, offset
        rows, columns = min(CELLS, queries), min(CELLS, keys)
        self.cells = torch.zeros(heads, rows, columns)
        self.edges = distance_edges(max(queries + abs(offset), keys))
        self.mass = torch.zeros(heads, len(self.edges), dtype=torch.float64)

    def add(self, start: int, columns: Tensor, weights: Tensor) -> None:
        """Add weights [H, T, K] of the queries from `start` on for the key slots `columns` [K]."""
        heads, count = weights.shape[:2]
        weights, columns = weights.abs().cpu(), columns.cpu()
        queries = torch.arange(start, start + count)
        _, rows, across = self.cells.shape
        cell = (queries * rows // self.queries).view(-1, 1) * across + columns * across // self.keys
        flat = self.cells.view(heads, -1)
        flat.scatter_reduce_(1, cell.flatten().expand(heads, -1), weights.flatten(1), "amax")
        distance = ((queries + self.offset).view(-1, 1) - columns).abs()
        bins = torch.bucketize(distance, torch.tensor(self.edges), right=True) - 1
        self.mass.scatter_add_(1, bins.flatten().expand(heads, -1), weights.flatten(1).double())

    @property
    def thumbnails(self) -> np.ndarray:
        """The thumbnails, uint8 [H, R, C]: the square root of the greatest weight, scaled to 255."""
        return (self.cells.clamp(0, 1).sqrt() * 255).round().byte().numpy()

    @property
    def distance(self) -> np.ndarray:
        """The distribution over distances, float32 [H, bins]; sums to 1 for each head with any weight."""
        return (self.mass / self.mass.sum(1, keepdim=True).clamp_min(1e-30)).float().numpy()


def distance_edges(longest: int) -> list[int]:
    """Return the starts of the bins, 0, 1, 2, 3, 5, 9, ...: each bin is twice as wide as the bin before."""
    edges, width = [0, 1, 2], 2
    start = 3
    while start < longest:
        edges.append(start)
        start, width = start + width, 2 * width
    return [edge for edge in edges if edge < max(1, longest)]


class AllowedKeys:
    """A collector of masks, tile by tile of queries, separate for each head or shared by all heads."""

    def __init__(self, keys: int):
        self.keys = keys
        self.tiles: list[tuple[Tensor, Tensor]] = []

    def add(self, columns: Tensor, allowed: Tensor) -> None:
        """Add the mask allowed [H or 1, T, K] bool over the key slots `columns` [K]."""
        self.tiles.append((columns.cpu(), allowed.cpu()))

    def pairs(self, heads: int) -> int:
        """Return the number of pairs over all heads of a page."""
        return sum(int(mask.sum()) * heads // len(mask) for _, mask in self.tiles)

    def written(self, buffers: Buffers, heads: int) -> dict[str, Any]:
        """Return `allowed`, None for full attention, and `allowed_of_head`; equal heads share a list."""
        if all(len(columns) == self.keys and bool(mask.all()) for columns, mask in self.tiles):
            return {"allowed": None}
        shared = all(len(mask) == 1 for _, mask in self.tiles)
        lists: dict[bytes, int] = {}
        allowed, of_head = [], []
        for head in range(1 if shared else heads):
            arrays = self._intervals(head)
            key = b"|".join(array.tobytes() for array in arrays)
            if key not in lists:
                lists[key] = len(allowed)
                names = ("offsets", "starts", "stops")
                allowed.append({name: buffers.add(array) for name, array in zip(names, arrays)})
            of_head.append(lists[key])
        return {"allowed": allowed, "allowed_of_head": of_head * heads if shared else of_head}

    def _intervals(self, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return int32 offsets [Tq + 1], and intervals start <= key < stop, for query i from offsets[i]."""
        counts, starts, stops = [torch.zeros(1, dtype=torch.long)], [], []
        for columns, masks in self.tiles:
            mask = masks[min(head, len(masks) - 1)]
            apart = torch.ones(len(columns) + 1, dtype=torch.bool)  # gaps between the slots
            apart[1:-1] = columns[1:] != columns[:-1] + 1
            edge = torch.zeros(len(mask), 1, dtype=torch.bool)
            before, after = torch.cat([edge, mask], 1)[:, :-1], torch.cat([mask, edge], 1)[:, 1:]
            first = mask & (~before | apart[:-1])
            last = mask & (~after | apart[1:])
            counts.append(first.sum(1))
            starts.append(columns[first.nonzero()[:, 1]])
            stops.append(columns[last.nonzero()[:, 1]] + 1)
        return (
            torch.cat(counts).cumsum(0).int().numpy(),
            torch.cat(starts).int().numpy(),
            torch.cat(stops).int().numpy(),
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The attention of one layer: a `request` of softmax attention, or any mechanism as `mix` of `values`.

    stack: "encoder" or "decoder", the stack of the queries; keys: the stack of the keys. marks: attributes of
    its tokens, such as their buckets. projected: the queries [G] that have separate projections, and their
    request. weights: a function that returns [H, Tq, Tk], if the values of the mechanism do not determine
    them. slots: if the keys are not tokens, the tokens start <= j < stop of each key, [Tk, 2].
    """

    stack: str
    keys: str
    layer: int
    mechanism: str
    pattern: str | None = None
    request: Request | None = None
    mix: Mix | None = None
    values: Tensor | None = None
    projected: tuple[Tensor, Request] | None = None
    marks: list[TokenRecord] = dataclasses.field(default_factory=list)
    weights: Callable[[], Tensor] | None = None
    slots: Tensor | None = None

    @property
    def cross(self) -> bool:
        """Return whether the keys are of another sequence."""
        return self.stack != self.keys

    def tiles(self) -> Iterator[WeightTile]:
        """Return an iterator over the weights of softmax attention by ranges of queries."""
        assert self.request is not None
        sink = next(
            (record for record in self.marks if isinstance(record, Mark) and record.name == SINK), None
        )
        if sink is not None:
            return with_sink(tiles(self.request), sink.values[0].float())
        if self.projected is None:
            return tiles(self.request)
        rows, request = self.projected
        return with_rows(tiles(self.request), rows.cpu(), tiles(request))

    @property
    def name(self) -> str:
        """The name of the call on the page."""
        return f"{self.stack} layer {self.layer + 1}, {'cross' if self.cross else 'self'}-attention"


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredCall:
    """A call's summaries; `lse` [H, Tq] of softmax attention, `matrix` [H, Tq, Tk] of any other."""

    call: Call
    shape: tuple[int, int, int]  # H, Tq, Tk
    summaries: Summaries
    allowed: AllowedKeys | None = None
    lse: np.ndarray | None = None
    matrix: Tensor | None = None

    @property
    def memory(self) -> int:
        """The number of keys before the first query's own key."""
        alone = self.call.cross or self.call.slots is not None
        return 0 if alone else max(0, self.shape[2] - self.shape[1])

    def weights(self) -> Tensor:
        """Return the weights [H, Tq, Tk], float32, for any attention."""
        if self.matrix is not None:
            return self.matrix
        weights = torch.zeros(self.shape)
        for tile in self.call.tiles():
            weights[:, tile.start : tile.stop, tile.columns.cpu()] = tile.weights.cpu()
        return weights


def measure_call(call: Call) -> MeasuredCall:
    """Return the measurements of a call, from one pass over it."""
    if call.request is not None:
        return _of_pairs(call, call.request)
    matrix = _matrix(call).cpu()
    heads, queries, keys = matrix.shape
    apart = call.cross or call.slots is not None
    summaries = Summaries(heads, queries, keys, 0 if apart else keys - queries)
    summaries.add(0, torch.arange(keys), matrix)
    return MeasuredCall(call, (heads, queries, keys), summaries, matrix=matrix)


def _matrix(call: Call) -> Tensor:
    """Return the matrix [H, Tq, Tk], float32, of a call without softmax over pairs of vectors."""
    if call.weights is not None:
        return call.weights().float()
    assert call.mix is not None
    assert call.values is not None
    return value_matrix(call.mix, call.values)


def _of_pairs(call: Call, request: Request) -> MeasuredCall:
    heads, queries, keys = request.q.shape[1], request.context.q_len, request.context.kv_len
    summaries = Summaries(heads, queries, keys, 0 if call.cross else request.context.offset)
    allowed, lse = AllowedKeys(keys), []
    for tile in call.tiles():
        summaries.add(tile.start, tile.columns, tile.weights)
        allowed.add(tile.columns, tile.allowed)
        lse.append(tile.lse.cpu())
    return MeasuredCall(call, (heads, queries, keys), summaries, allowed, torch.cat(lse, 1).numpy())
