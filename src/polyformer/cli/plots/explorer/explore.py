"""The page that shows a model's attention on a text: one file with data, style and script inside.

The page may not load or run anything else. It computes weights from queries and keys, which it stores as
precisely as the wanted size allows, or it stores the weights.
"""

import base64
import dataclasses
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.attention.functional.backends.definition import tiles
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.score_steps import steps_of
from polyformer.cli.plots.explorer.calls import Buffers, Call, MeasuredCall, measure_call
from polyformer.cli.plots.explorer.reading import Picture, Prediction, Reading, only_kept
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import Lookup, Mark

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


MEGABYTES = 20
"""The default size of a page in megabytes."""

LABELS = 5
"""The most labels of a prediction that are shown."""

MATRIX_TOKENS = 2048
"""The most tokens of a text for a mechanism other than softmax: its matrix is n x n."""


def page_of(
    *readings: Reading, title: str = "Attention explorer", subtitle: str = "", megabytes: float = MEGABYTES
) -> str:
    """Return the page of one reading, or of two next to each other: HTML without other files.

    megabytes: the largest size of the page: beyond it, numbers are rounded to fewer bits and then layers have
    only thumbnails, which the page reports. Raises `InputError` for no reading or more than two, for a model
    whose attention cannot be observed, and for a text that is too long for a mechanism other than softmax.
    """
    if not 1 <= len(readings) <= 2:
        raise InputError(f"readings: expected 1, or 2 to compare, got {len(readings)}")
    buffers = Buffers()
    sites = [[measure_call(call) for call in _calls(reading)] for reading in readings]
    runs = [_summarized(reading, own, buffers) for reading, own in zip(readings, sites)]
    everything = [site for own in sites for site in own]
    header = {"version": 1, "title": title, "subtitle": subtitle, "runs": runs}
    script = sum(len(asset(name)) for name in ("explorer.js", "explorer.css"))
    budget = int((megabytes * 1e6 - script) * 3 / 4 - 1.1 * buffers.size) - 2000 * len(everything)
    precision, chosen = planned(everything, budget)
    described = [site for run in runs for site in run["sites"]]
    for number in chosen:
        described[number]["detail"] = written(everything[number], precision, buffers)
    for run in runs:
        run["notes"] = _notes(run, precision, megabytes)
    return write(header, buffers)


def _calls(reading: Reading) -> list[Call]:
    with only_kept(reading.model, reading.kept):
        calls = recorded_calls(reading.model, reading.inputs)
    for call in calls:
        if call.values is not None and call.values.shape[2] > MATRIX_TOKENS:
            raise InputError(
                f"text: the matrix of {call.mechanism} attention is shown for at most {MATRIX_TOKENS} "
                f"tokens, got {call.values.shape[2]}; take a shorter text"
            )
    if not calls:
        raise InputError(f"model: {reading.name} computes no attention on this text")
    return calls


def _summarized(reading: Reading, sites: Sequence[MeasuredCall], buffers: Buffers) -> dict[str, Any]:
    """Return a run of the page, without details."""
    parameters = sum(parameter.numel() for parameter in reading.model.parameters())
    layers = len({(site.call.stack, site.call.layer) for site in sites})
    effects = {}
    if reading.effects is not None:
        losses, rises = (buffers.add(each.float().cpu().numpy()) for each in reading.effects)
        effects = {"effects": {"losses": losses, "rises": rises}}
    return {
        **effects,
        "name": reading.name,
        "model": f"{layers} layers, {sites[0].shape[0]} heads, {parameters:,} parameters",
        "tokens": {stack: list(tokens) for stack, tokens in reading.tokens.items()},
        "prompt": reading.prompt,
        "pixels": None if reading.picture is None else _pixels(reading.picture, buffers),
        "prediction": None if reading.prediction is None else _prediction(reading.prediction),
        "before": list(reading.before),
        "stored": list(reading.stored),
        "sites": [_described(site, reading, buffers) for site in sites],
        "notes": [],
    }


def _pixels(picture: Picture, buffers: Buffers) -> dict[str, Any]:
    """Return the image of a run."""
    height, width, channels = picture.pixels.shape
    return {
        "height": height,
        "width": width,
        "channels": channels,
        "data": buffers.add(picture.pixels),
        "patch": list(picture.patch),
        "first": picture.first,
        "tokens": picture.tokens,
        "patches": {stack: list(size) for stack, size in picture.patches.items()},
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    """Return the most probable labels of an image, and its right label."""
    best = list(prediction.probabilities.items())[:LABELS]
    labels = [{"name": name, "probability": share} for name, share in best]
    return {"labels": labels, "label": prediction.label}


def _described(site: MeasuredCall, reading: Reading, buffers: Buffers) -> dict[str, Any]:
    """Return a site of the page, without its detail."""
    call, summaries = site.call, site.summaries
    allowed = {"allowed": None} if site.allowed is None else site.allowed.written(buffers, site.shape[0])
    return {
        "name": call.name,
        "stack": call.stack,
        "kind": "cross" if call.cross else "self",
        "layer": call.layer,
        "mechanism": call.mechanism,
        "pattern": call.pattern,
        "heads": site.shape[0],
        "queries": call.stack,
        "keys": call.keys,
        "thumbnails": buffers.add(summaries.thumbnails),
        "distance": None if call.cross or call.slots is not None else buffers.add(summaries.distance),
        "distance_edges": summaries.edges,
        **allowed,
        "detail": None,
        "marks": [
            {
                "name": mark.name,
                "of": mark.of,
                "names": list(mark.names),
                "values": buffers.add(_numbers(mark.values[0])),
            }
            for mark in _marks(site, reading)
        ],
        "memory": site.memory,
        "slots": None if call.slots is None else buffers.add(call.slots.cpu().int().numpy()),
        "lookups": [_lookup(record, buffers) for record in call.marks if isinstance(record, Lookup)],
    }


def _lookup(record: Lookup, buffers: Buffers) -> dict[str, Any]:
    """Return the lookups of the queries of the first row."""
    integers = {"entries": record.entries, "rows": record.rows, "tokens": record.tokens}
    return {
        "name": record.name,
        "count": record.count,
        "weights": buffers.add(record.weights[0].float().cpu().numpy()),
        **{
            name: None if table is None else buffers.add(table[0].int().cpu().numpy())
            for name, table in integers.items()
        },
    }


def _marks(site: MeasuredCall, reading: Reading) -> list[Mark]:
    """Return, by name, the last mark with a value per token of the call, and a mark for a memory's keys."""
    _, queries, keys = site.shape
    lengths = {"tokens": queries, "queries": queries, "keys": keys}
    marks = [record for record in site.call.marks if isinstance(record, Mark)]
    fitting = [mark for mark in marks if mark.values.shape[2] == lengths[mark.of]]
    if site.memory:
        slots = torch.arange(keys)
        labels = (slots >= reading.compressed).long().masked_fill(slots >= site.memory, -1)
        fitting.append(Mark("memory", labels.view(1, 1, -1), "keys", ("compressed", "kept")))
    return list({mark.name: mark for mark in fitting}.values())


def _numbers(values: Tensor) -> np.ndarray:
    """Return the values [H or 1, T]: labels as int16, amounts as float32."""
    numbers = values.float() if values.is_floating_point() else values.short()
    return numbers.cpu().numpy()


def _notes(run: dict[str, Any], precision: str, megabytes: float) -> list[str]:
    """Return the contents that the page omits, with the reasons."""
    notes = []
    without = [site["name"] for site in run["sites"] if site["detail"] is None]
    if without:
        notes.append(
            f"{len(without)} of {len(run['sites'])} layers have thumbnails alone, for a page of at most "
            f"{megabytes:g} MB: {', '.join(without)}"
        )
    if precision != "float32" and any((site["detail"] or {}).get("kind") == "pairs" for site in run["sites"]):
        notes.append(f"queries and keys are rounded to {precision}")
    return notes


def write(header: dict[str, Any], buffers: Buffers) -> str:
    """Return the page of `header`, with references into `buffers`."""
    script, style = asset("explorer.js"), asset("explorer.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(header, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(header['title'])}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="explorer"></div>\n<noscript><p>This page is drawn by its script.</p></noscript>\n'
        f'<script type="application/json" id="explorer-data">{data}</script>\n'
        f'<script type="application/octet-stream;base64" id="explorer-buffers">{buffers.base64()}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Return the text of a file next to this module."""
    return (files("polyformer.cli.plots.explorer") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
