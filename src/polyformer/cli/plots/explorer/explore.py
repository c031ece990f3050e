"""The page that shows a model's attention on a text: `explore`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyformer.cli.plots.explorer.calls import Call, MeasuredCall, measure_call
from polyformer.cli.plots.explorer.detail import planned, written
from polyformer.cli.plots.explorer.kept_keys import only_kept
from polyformer.cli.plots.explorer.page import Buffers, asset, write
from polyformer.cli.plots.explorer.reading import Picture, Prediction, Reading
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import Lookup, Mark

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
