"""What a page computes weights from: queries and keys, as precise as there is room for; or the weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from polyformer.visual.explorer.buffers import Buffers
from polyformer.visual.explorer.calls import Measured

PRECISIONS = {"float32": 4, "float16": 2, "int8": 1}
"""Bytes of a number of q and k; int8 has a scale for each vector."""


def by_pairs(site: Measured) -> bool:
    """Whether the page can compute the weights from q and k: biases by distance are all that is added."""
    request = site.call.request
    if request is None or request.score_mod is not None:
        return False
    relative = request.relative
    return relative is None or (relative.position_keys is None and relative.position_queries is None)


def size(site: Measured, precision: str) -> int:
    """Bytes of a site's detail."""
    heads, queries, keys = site.shape
    if not by_pairs(site):
        return 2 * heads * queries * keys
    request = site.call.request
    assert request is not None
    width, key_heads = request.q.shape[3], request.k.shape[1]
    vectors = heads * queries + key_heads * keys
    return vectors * (width * PRECISIONS[precision] + 4 * (precision == "int8")) + 4 * heads * queries


def planned(sites: Sequence[Measured], room: int) -> tuple[str, list[int]]:
    """The finest precision in which the details of all sites take at most `room` bytes, and these sites; in
    the coarsest as many, evenly spread, as there is room for."""
    for precision in PRECISIONS:
        if sum(size(site, precision) for site in sites) <= room:
            return precision, list(range(len(sites)))
    for count in range(len(sites) - 1, 0, -1):
        picked = [i * len(sites) // count for i in range(count)]
        if sum(size(sites[i], precision) for i in picked) <= room:
            return precision, picked
    return precision, []


def written(site: Measured, precision: str, buffers: Buffers) -> dict[str, Any]:
    """The site's detail, its arrays in `buffers`."""
    if not by_pairs(site):
        return {"kind": "weights", "values": buffers.add(site.weights().half().numpy())}
    request = site.call.request
    assert request is not None
    assert site.lse is not None
    lse = np.where(np.isneginf(site.lse), np.float32(-1e30), site.lse).astype(np.float32)
    bias = None if request.relative is None else request.relative.bias
    return {
        "kind": "pairs",
        **_vectors("q", request.q[0], precision, buffers),
        **_vectors("k", request.k[0], precision, buffers),
        "scale": request.scale,
        "lse": buffers.add(lse),
        "bias": None if bias is None else buffers.add(bias.detach().float().cpu().numpy()),
        "by_query": None,
        "by_key": None,
        "first": 0 if request.relative is None else request.relative.first,
    }


def _vectors(name: str, x: Tensor, precision: str, buffers: Buffers) -> dict[str, Any]:
    """x [H, T, D], and for int8 the scale [H, T] of each vector."""
    values = x.detach().float().cpu().numpy()
    if precision != "int8":
        return {name: buffers.add(values.astype(precision)), f"{name}_scales": None}
    scales = np.maximum(np.abs(values).max(-1), 1e-12) / 127
    rounded = np.rint(values / scales[..., None]).astype(np.int8)
    return {name: buffers.add(rounded), f"{name}_scales": buffers.add(scales.astype(np.float32))}
