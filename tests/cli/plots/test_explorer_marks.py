"""What mechanisms say of tokens, in the explorer: buckets, clusters, spans, experts, memories, globals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from playwright.sync_api import Page
from torch import Tensor, nn

from polyformer import InputError, create_model
from polyformer.cli.plots.explorer import page_of
from polyformer.cli.plots.explorer.calls import Call, measure_call
from polyformer.cli.plots.explorer.reading import PolyformerTexts, Reading
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.core.instrumentation import Mark, collect_marks, record_mark
from polyformer.models.architectures import Transformer

LENGTH = 23
IDS = torch.randint(5, 60, (1, LENGTH), generator=torch.Generator().manual_seed(3))
SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(preset: str = "decoder-tiny", **options: Any) -> Transformer:
    torch.manual_seed(0)
    return create_model(preset, **{**SIZE, **options}).eval()


def calls_of(model: nn.Module) -> list[Call]:
    return recorded_calls(model, {"input_ids": IDS})


def marks_of(call: Call) -> dict[str, Mark]:
    return {mark.name: mark for mark in call.marks}


def test_nothing_is_computed_where_nobody_looks():
    def values() -> Tensor:
        asked.append(1)
        return torch.zeros(1, 1, 3)

    asked: list[int] = []
    record_mark("bucket", values)
    assert not asked
    with collect_marks() as marks:
        record_mark("bucket", values, "keys", ("left", "right"))
    record_mark("bucket", values)
    assert (len(asked), len(marks)) == (1, 1)
    assert (marks[0].name, marks[0].of, marks[0].names) == ("bucket", "keys", ("left", "right"))


def test_buckets_of_each_round_decide_who_meets():
    for call in calls_of(model_of(attention="lsh(rounds=2, buckets=4, window=30)", position="rope")):
        marks = marks_of(call)
        assert list(marks) == ["bucket, round 1", "bucket, round 2"]
        buckets = torch.stack([each.values[0] for each in marks.values()])  # [R, H, T]
        assert buckets.shape == (2, 4, LENGTH)
        shared = (buckets.unsqueeze(-1) == buckets.unsqueeze(-2)).any(0).tril(-1)
        shared |= torch.diag_embed(~shared.any(-1))  # a token sees itself where there is nothing else
        assert torch.equal(measure_call(call).weights() > 0, shared)


def test_clusters_of_routed_heads_decide_who_meets():
    model = model_of(attention="routing(clusters=3, window=30, local_window=4)", position="rope")
    for call in calls_of(model):
        marks = marks_of(call)
        queries, keys = (marks[f"cluster of {of}"] for of in ("queries", "keys"))
        assert (queries.of, keys.of) == ("queries", "keys")
        assert queries.values[:, :2].eq(-1).all(), "local heads have no clusters"
        shared = (queries.values[0].unsqueeze(-1) == keys.values[0].unsqueeze(-2)).tril()
        assert torch.equal(measure_call(call).weights()[2:] > 0, shared[2:])


def test_spans_are_amounts_of_queries():
    adaptive = model_of(attention="adaptive_span(max_span=20, ramp=2, initial=0.25)", position="none")
    dynamic = model_of(attention="dynamic_span(max_span=20, ramp=2, initial=0.0)", position="none")
    nn.init.normal_(dynamic.decoder.layers[0].attention.mechanism.vector)
    call, _ = calls_of(adaptive)
    spans = marks_of(call)["span (tokens)"]
    assert spans.of == "queries"
    assert spans.values.shape == (1, 4, LENGTH)
    assert spans.values.eq(5).all()
    distance = torch.arange(LENGTH).view(-1, 1) - torch.arange(LENGTH)
    assert torch.equal(measure_call(call).weights()[0] > 0, (distance >= 0) & (distance < 7))
    call, _ = calls_of(dynamic)
    spans = marks_of(call)["span (tokens)"].values[0]
    assert len(spans.unique()) > LENGTH
    assert torch.equal(
        measure_call(call).weights() > 0, (distance >= 0) & (distance < spans.unsqueeze(-1) + 2)
    )


def test_experts_and_their_gates_stand_at_their_layer():
    model = model_of(feedforward="experts(experts=3, top_k=2)")
    expected = []
    for layer in model.decoder.layers:
        layer.feedforward.register_forward_pre_hook(
            lambda experts, inputs: expected.append(experts.route(inputs[0], None))
        )
    for call, (chosen, gates, _) in zip(calls_of(model), expected, strict=True):
        marks = marks_of(call)
        assert list(marks) == ["expert, choice 1", "gate, choice 1", "expert, choice 2", "gate, choice 2"]
        for choice in range(2):
            assert torch.equal(marks[f"expert, choice {choice + 1}"].values[:, 0], chosen[..., choice])
            assert torch.equal(marks[f"gate, choice {choice + 1}"].values[:, 0], gates[..., choice])


def test_layers_run_are_a_mark():
    model = model_of(depth="act")
    assert all(marks_of(call)["layers run"].values.shape == (1, 1, LENGTH) for call in calls_of(model))


@pytest.mark.parametrize(
    "memory", ["recurrent(length=8)", "compressive(length=6, compressed_length=4, rate=2)"]
)
def test_the_memory_of_a_segment_is_labelled(memory: str):
    model = model_of(memory=memory, position="rope")
    reading = PolyformerTexts("xl", model).of_ids(IDS[0].tolist(), segment=9)
    last = IDS[0, 18:].tolist()
    assert reading.inputs["input_ids"].tolist() == [last]
    names = [f"[{number}]" for number in IDS[0, :18].tolist()]
    site = measure_call(recorded_calls(model, reading.inputs)[0])
    assert site.memory == len(reading.before)
    kept = len(reading.before) - reading.compressed
    assert [*reading.before][reading.compressed :] == names[18 - kept :]
    assert reading.compressed == (0 if memory.startswith("recurrent") else 4)
    assert site.weights()[..., : site.memory].sum() > 0


def test_the_gate_of_a_store_is_shown_where_something_is_found():
    model = model_of(
        memory="memorizing(length=4, store=64, neighbours=2, layer=1, gate=0.5)", position="rope"
    )
    first, second = recorded_calls(
        model, PolyformerTexts("mem", model).of_ids(IDS[0].tolist(), segment=9).inputs
    )
    assert "gate of the store" not in marks_of(first)
    gates = marks_of(second)["gate of the store"].values
    torch.testing.assert_close(gates, torch.full((1, 4, 5), 0.5).sigmoid())
    _, second = calls_of(model)  # one segment: nothing is stored before it
    assert (
        "gate of the store" not in marks_of(second) or not marks_of(second)["gate of the store"].values.any()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "segment: only for decoders with a memory"),
        (
            {"memory": "recurrent(length=8)", "position": "rope", "segment": 0},
            "segment: expected 1 token or more",
        ),
    ],
)
def test_segments_need_a_memory(options: dict[str, Any], said: str):
    segment = options.pop("segment", 9)
    with pytest.raises(InputError, match=said):
        PolyformerTexts("x", model_of(**options)).of_ids([5, 6], segment=segment)


def test_global_tokens_are_seen_by_projections_of_their_own():
    attention = {"mechanism": "Window(3) | Global(2)", "num_attention_heads": 4, "global_projections": True}
    options = {name: value for name, value in SIZE.items() if name != "num_attention_heads"}
    torch.manual_seed(0)
    model = create_model("encoder-tiny", **options, attention=attention, position="rope").eval()
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
    for call, weights in zip(calls_of(model), expected, strict=True):
        flags = marks_of(call)["global"].values[0, 0]
        assert flags.tolist() == [0, 0] + [-1] * (LENGTH - 2)
        site = measure_call(call)
        torch.testing.assert_close(site.weights(), weights[0], atol=1e-6, rtol=1e-5)
        assert site.call.request is not None


def saved_page(model: Transformer, folder: Path, reading: Reading | None = None) -> Path:
    """A page of the model."""
    side = "encoder" if model.decoder is None else "decoder"
    words = {side: [f"word{i}" for i in range(LENGTH)]}
    path = folder / "page.html"
    reading = reading or Reading(name="model", model=model, inputs={"input_ids": IDS}, tokens=words)
    path.write_text(page_of(reading), encoding="utf-8")
    return path


def said(tab: Page) -> dict[str, list[float | None]]:
    """The page's table of marks: of the pinned query and key."""
    rows = tab.locator("table.said tbody tr").evaluate_all(
        """rows => rows.map(row =>
            [row.dataset.mark, ...[...row.querySelectorAll('td')].map(td => td.dataset.value)])"""
    )
    return {name: [None if value is None else float(value) for value in values] for name, *values in rows}


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "lsh(rounds=2, buckets=4, window=30)", "position": "rope"},
        {"attention": "routing(clusters=3, window=30, local_window=4)", "position": "rope"},
        {"feedforward": "experts(experts=3, top_k=2)"},
        {"attention": "dynamic_span(max_span=20, ramp=2)", "position": "none"},
    ],
)
def test_marks_stand_beside_the_matrix(opened: Callable[..., Page], tmp_path: Path, options: dict[str, str]):
    model = model_of(**options)
    marks = marks_of(calls_of(model)[1])
    tab = opened(saved_page(model, tmp_path), "view=matrix&layer=2&head=4&query=17&key=6")
    table = said(tab)
    assert list(table) == list(marks)
    for name, each in marks.items():
        values = each.values[0].expand(4, -1)[3]
        pair = [None if each.of == "keys" else values[17], None if each.of == "queries" else values[6]]
        assert [*map(shown, pair)] == [value and pytest.approx(value, rel=1e-5) for value in table[name]]
    legends = tab.locator("dl.marks")
    assert legends.locator("dt").all_inner_texts() == list(marks)
    labels, *_ = marks.values()
    if not labels.values.is_floating_point():
        entries = tab.locator(f"dd[data-mark='{labels.name}'] .key").all_inner_texts()
        assert [*map(int, entries)] == [value for value in labels.values.unique().tolist() if value >= 0]


def shown(value: Tensor | None) -> float | None:
    """As the page has it: no label is no number."""
    return None if value is None or (not value.is_floating_point() and value < 0) else float(value)


def test_strips_have_the_colours_of_their_labels(opened: Callable[..., Page], tmp_path: Path):
    model = model_of(attention="lsh(rounds=1, buckets=4, window=30)", position="rope")
    buckets = marks_of(calls_of(model)[0])["bucket, round 1"].values[0, 0].numpy()
    tab = opened(saved_page(model, tmp_path), "view=matrix&layer=1&head=1&query=2")
    tab.wait_for_selector(".grid canvas[data-ready=true]")
    script = """(canvas, count) => {
        const [left, above, size] = canvas.dataset.origin.split(" ").map(Number);
        const box = canvas.closest(".grid");
        const copy = new OffscreenCanvas(canvas.width, canvas.height);
        const pen = copy.getContext("2d", { willReadFrequently: true });
        pen.drawImage(canvas, 0, 0);
        return Array.from({ length: count }, (_, row) =>
            Math.floor(above + (row + 0.5) * size - box.scrollTop)
        ).map((y) => [...pen.getImageData(left - 6, y, 1, 1).data.slice(0, 3)]);
    }"""
    colours = np.array(tab.locator(".grid canvas").first.evaluate(script, 12))
    for i in range(12):
        for j in range(12):
            assert (colours[i] == colours[j]).all() == (buckets[i] == buckets[j])


def test_keys_of_a_memory_are_called_what_they_are(opened: Callable[..., Page], tmp_path: Path):
    model = model_of(memory="compressive(length=6, compressed_length=4, rate=2)", position="transformer_xl")
    reading = PolyformerTexts("xl", model).of_ids(IDS[0].tolist(), segment=9)
    weights = measure_call(recorded_calls(model, reading.inputs)[1]).weights()[0, 4]
    tab = opened(saved_page(model, tmp_path, reading), "view=matrix&layer=2&head=1&query=4&key=1")
    assert "compressed 2" in tab.locator("output.readout").inner_text()
    assert said(tab)["memory"] == [None, 0.0]
    tab.evaluate("location.hash = 'view=matrix&layer=2&head=1&query=4&key=5'")
    assert said(tab)["memory"] == [None, 1.0]
    assert reading.before[5] in tab.locator("output.readout").inner_text()
    script = "rows => rows.map(row => [Number(row.dataset.key), Number(row.dataset.weight)])"
    for key, weight in tab.locator("table.keys tbody tr").evaluate_all(script):
        assert weight == pytest.approx(float(weights[int(key)]), abs=1e-4)


def test_the_neuron_view_of_global_tokens_adds_up(opened: Callable[..., Page], tmp_path: Path):
    attention = {"mechanism": "Window(3) | Global(2)", "num_attention_heads": 4, "global_projections": True}
    options = {name: value for name, value in SIZE.items() if name != "num_attention_heads"}
    torch.manual_seed(0)
    model = create_model("encoder-tiny", **options, attention=attention, position="rope").eval()
    weights = measure_call(calls_of(model)[1]).weights()[2]
    path = saved_page(model, tmp_path)
    for query, key in ((1, 20), (9, 1)):
        tab = opened(path, f"view=neuron&layer=2&head=3&query={query}&key={key}")
        weight = tab.locator("tr[data-term=weight]").get_attribute("data-value")
        assert float(weight or "nan") == pytest.approx(float(weights[query, key]), abs=1e-5)


@pytest.mark.parametrize(
    ("position", "terms"), [("shaw", 1), ("transformer_xl", 1), ("deberta", 2), ("t5", 1), ("alibi", 1)]
)
def test_terms_of_positions_are_rows_of_the_neuron_view(
    opened: Callable[..., Page], tmp_path: Path, position: str, terms: int
):
    model = model_of(position=position)
    weights = measure_call(calls_of(model)[1]).weights()[3]
    tab = opened(saved_page(model, tmp_path), "view=neuron&layer=2&head=4&query=17&key=6")
    rows = tab.locator("tr[data-term]").evaluate_all(
        "rows => rows.map(row => [row.dataset.term, Number(row.dataset.value)])"
    )
    values = dict(rows)
    added = [values[f"position-{i + 1}"] for i in range(terms)]
    assert len(rows) == 5 + terms
    assert all(added), "a position term of zero says nothing"
    assert values["score"] == pytest.approx(values["scaled"] + sum(added))
    assert values["weight"] == pytest.approx(float(weights[17, 6]), rel=1e-3)
