"""What is no token in the explorer: blocks sorted into a place, compressed slots, entries of a store."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from playwright.sync_api import Page
from torch import Tensor

from polyformer import create_model
from polyformer.attention.mechanisms.sinkhorn.definition import permutation
from polyformer.cli.plots.explorer import page_of
from polyformer.cli.plots.explorer.calls import Call, measure_call
from polyformer.cli.plots.explorer.reading import PolyformerTexts, Reading
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.core.instrumentation import Lookup, Mark, record_lookup
from polyformer.models.architectures import Transformer
from polyformer.nn.memory.memorizing import Memorizing

LENGTH, BLOCK = 23, 4
IDS = torch.randint(5, 60, (1, LENGTH), generator=torch.Generator().manual_seed(3))
SIZE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SORTED, STORE = "blocks sorted into its place", "retrieved from the store"
SINKHORN = f"sinkhorn(block_size={BLOCK}, max_length=64, temperature=0.3)"
MEMORY = "memorizing(length=4, store=64, neighbours=3, layer=1, gate=0.5)"


def model_of(preset: str = "decoder-tiny", **options: Any) -> Transformer:
    torch.manual_seed(0)
    return create_model(preset, **{**SIZE, **options}).eval()


def lookups_of(call: Call) -> list[Lookup]:
    return [said for said in call.marks if isinstance(said, Lookup)]


def labels(call: Call, name: str) -> list[int]:
    return next(
        said.values[0, 0].tolist() for said in call.marks if isinstance(said, Mark) and said.name == name
    )


def saved_page(model: Transformer, folder: Path, reading: Reading | None = None) -> Path:
    tokens = {side: [f"word{i}" for i in range(LENGTH)] for side in ("encoder", "decoder")}
    reading = reading or Reading(name="model", model=model, inputs={"input_ids": IDS}, tokens=tokens)
    path = folder / "page.html"
    path.write_text(page_of(reading), encoding="utf-8")
    return path


def test_nothing_is_said_where_nobody_looks():
    record_lookup(lambda: pytest.fail("somebody asked"))


@pytest.mark.parametrize("causal", [True, False])
def test_the_soft_permutation_is_that_of_the_definition(causal: bool):
    model = model_of("decoder-tiny" if causal else "encoder-tiny", attention=SINKHORN, position="none")
    side = model.decoder if causal else model.encoder
    assert side is not None
    inputs: list[tuple[Any, ...]] = []
    mechanism: Any = side.layers[0].attention.mechanism
    mechanism.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))
    call, _ = recorded_calls(model, {"input_ids": IDS})
    keys, context = inputs[0][1][0], inputs[0][3]
    assert context.causal == causal
    expected = permutation(keys, mechanism.net, mechanism.config.sorting(False), causal)
    (lookup,) = lookups_of(call)
    assert (lookup.name, lookup.count, lookup.entries) == (SORTED, 6, None)
    torch.testing.assert_close(lookup.weights[0], expected, atol=1e-6, rtol=1e-5)
    assert lookup.rows is not None
    assert lookup.rows[0].tolist() == labels(call, "block") == [i // BLOCK for i in range(LENGTH)]
    assert lookup.tokens is not None
    assert lookup.tokens[0].tolist() == [[b * BLOCK, min(LENGTH, b * BLOCK + BLOCK)] for b in range(6)]


def test_queries_of_a_cut_sort_read_the_same_places():
    attention = f"sort_cut(block_size={BLOCK}, max_length=64, cut=2)"
    call, _ = recorded_calls(
        model_of("encoder-tiny", attention=attention, position="none"), {"input_ids": IDS}
    )
    (lookup,) = lookups_of(call)
    assert lookup.weights.shape == (1, 4, 2, 6)
    assert lookup.rows is None
    torch.testing.assert_close(lookup.weights.sum(-1), torch.ones(1, 4, 2))


@pytest.mark.parametrize("position", ["none", "alibi", "da", "shaw"])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 3), (4, 2)])
def test_keys_of_compressed_attention_are_slots(kernel: int, stride: int, position: str):
    model = model_of(attention=f"memory_compressed(kernel={kernel}, stride={stride})", position=position)
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
    windows = [[s, s + kernel] for s in range(0, LENGTH - kernel + 1, stride)]
    for call, weights in zip(recorded_calls(model, {"input_ids": IDS}), expected, strict=True):
        site = measure_call(call)
        assert call.slots is not None
        assert call.slots.tolist() == [[0, 1], *windows]
        torch.testing.assert_close(site.weights(), weights[0], atol=1e-6, rtol=1e-5)
        assert site.memory == 0


def test_slots_at_the_end_of_a_text_have_what_is_left():
    model = model_of("encoder-tiny", attention="memory_compressed(kernel=4, stride=4)", position="none")
    call, _ = recorded_calls(model, {"input_ids": IDS})
    assert call.slots is not None
    assert call.slots.tolist()[-2:] == [[16, 20], [20, 23]]


@pytest.mark.parametrize(
    ("memory", "count", "kept"),
    [
        (MEMORY, 18, 14),
        ("memorizing(length=4, store=7, neighbours=3, layer=1, gate=0.5)", 11, 7),
        ("memorizing(length=0, store=64, neighbours=3, layer=1, sinks=2)", 14, 14),
    ],
)
def test_entries_of_a_store_are_the_nearest_and_have_their_tokens(
    monkeypatch: pytest.MonkeyPatch, memory: str, count: int, kept: int
):
    model, stored, queries = model_of(memory=memory, position="rope"), list[Tensor](), list[Tensor]()
    append, mixed = Memorizing.update_store, Memorizing.mix_with_store

    def watched(self: Any, store: Any, x: Tensor, layer: Any, context: Any) -> Any:
        stored.append(F.normalize(layer.keys_and_values(x[:, self.sinks :])[0], dim=-1)[0])
        return append(self, store, x, layer, context)

    def asked(self: Any, y: Tensor, q: Tensor, store: Any, context: Any) -> Tensor:
        queries.append(F.normalize(q, dim=-1)[0])
        return mixed(self, y, q, store, context)

    monkeypatch.setattr(Memorizing, "update_store", watched)
    monkeypatch.setattr(Memorizing, "mix_with_store", asked)
    reading = PolyformerTexts("m", model).of_ids(IDS[0].tolist(), segment=9)
    keys = torch.cat(stored, 1)  # [Hkv, N, D], of both segments before the last
    first, second = recorded_calls(model, reading.inputs)
    assert not lookups_of(first)
    (lookup,) = lookups_of(second)
    assert lookup.count == count
    names = [*reading.stored][len(reading.stored) - count :]
    sinks = 2 if "sinks" in memory else 0
    ids = IDS[0].tolist()
    assert names == [f"[{i}]" for i in [*ids[sinks:9], *ids[9 + sinks : 18]]][-count:]
    products = queries[-1] @ keys[:, -count:][:, :kept].mT
    best = products.topk(3, dim=-1)
    assert lookup.entries is not None
    assert torch.equal(lookup.entries[0].sort(-1).values, best.indices.sort(-1).values)
    memory_module: Any = next(part for part in model.modules() if isinstance(part, Memorizing))
    temperature = (10 * memory_module.temperature).exp()[:, None, None]
    torch.testing.assert_close(
        lookup.weights[0].sort(-1).values,
        (best.values * temperature).softmax(-1).sort(-1).values,
        atol=1e-5,
        rtol=1e-4,
    )
    assert lookup.rows is not None
    assert lookup.rows[0].tolist() == [0, 1, 2, 3, 4]


def taken(tab: Page) -> dict[int, float]:
    """The lookup's table of the pinned query: weights by entry."""
    rows = tab.locator(".lookup tbody tr").evaluate_all(
        "rows => rows.map(row => [Number(row.dataset.entry), Number(row.dataset.weight)])"
    )
    return {int(entry): weight for entry, weight in rows}


def test_the_soft_permutation_is_shown_beside_the_matrix(opened: Callable[..., Page], tmp_path: Path):
    model = model_of("encoder-tiny", attention=SINKHORN, position="none")
    call = recorded_calls(model, {"input_ids": IDS})[1]
    weights = lookups_of(call)[0].weights[0, 2]
    tab = opened(saved_page(model, tmp_path), "view=matrix&layer=2&head=3&query=9")
    tab.set_default_timeout(5000)
    assert taken(tab) == {j: pytest.approx(float(weights[2, j]), abs=1e-5) for j in range(6)}
    section = tab.locator(".lookup")
    assert "block 2: blocks sorted into its place; 6 of 6" in section.locator("caption").inner_text()
    assert section.locator("tr[data-entry='3'] .range").inner_text() == "12\u201315"
    picture = section.locator("canvas.places[data-ready=true]")
    colours = picture.evaluate(
        """canvas => {
            const ratio = window.devicePixelRatio || 1;
            const copy = new OffscreenCanvas(canvas.width, canvas.height);
            const pen = copy.getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, 0, 0);
            return Array.from({ length: 36 }, (_, i) => {
                const [x, y] = [52 + 24 * (i % 6) + 12, 24 * Math.floor(i / 6) + 12];
                return pen.getImageData(x * ratio, y * ratio, 1, 1).data.slice(0, 3).reduce((a, b) => a + b);
            });
        }"""
    )
    order = weights.flatten().argsort().tolist()
    light = [colours[i] for i in order]
    assert all(after <= before + 2 for before, after in itertools.pairwise(light)), "more weight is darker"


def test_slots_are_named_by_their_tokens(opened: Callable[..., Page], tmp_path: Path):
    model = model_of(attention="memory_compressed(kernel=3, stride=3)", position="alibi")
    weights = measure_call(recorded_calls(model, {"input_ids": IDS})[1]).weights()[1]
    tab = opened(saved_page(model, tmp_path), "view=matrix&layer=2&head=2&query=20&key=3")
    tab.set_default_timeout(5000)
    said = tab.locator("output.readout").inner_text()
    assert "slot 3, tokens 6\u20138, word6 word7 word8" in said
    script = "rows => rows.map(row => [Number(row.dataset.key), Number(row.dataset.weight)])"
    shown = dict(tab.locator("table.keys tbody tr").evaluate_all(script))
    assert shown == {key: pytest.approx(float(weights[20, int(key)]), abs=1e-5) for key in range(8)}
    tab.evaluate("location.hash = 'view=neuron&layer=2&head=2&query=20&key=3'")
    values = tab.locator("tr[data-term=position-1]").get_attribute("data-value")
    assert float(values or 0) < 0
    tab.evaluate("location.hash = 'view=path&query=20'")
    tab.wait_for_selector("canvas.lanes[data-ready=true]")
    expected = torch.eye(LENGTH)[20]
    for call in reversed(recorded_calls(model, {"input_ids": IDS})):
        spread = torch.zeros(8, LENGTH)
        for slot, (start, stop) in enumerate(call.slots.tolist() if call.slots is not None else []):
            spread[slot, start:stop] = 1 / (stop - start)
        mean = measure_call(call).weights().mean(0) @ spread
        expected = expected @ (0.5 * mean + 0.5 * torch.eye(LENGTH))
    script = "rows => rows.map(row => [Number(row.dataset.token), Number(row.dataset.share)])"
    for token, share in tab.locator("tr[data-token]").evaluate_all(script):
        assert share == pytest.approx(float(expected[int(token)]), abs=1e-4)


def test_retrieved_entries_are_shown_with_their_tokens(opened: Callable[..., Page], tmp_path: Path):
    model = model_of(memory=MEMORY, position="rope")
    reading = PolyformerTexts("m", model).of_ids(IDS[0].tolist(), segment=9)
    (lookup,) = lookups_of(recorded_calls(model, reading.inputs)[1])
    assert lookup.entries is not None
    tab = opened(saved_page(model, tmp_path, reading), "view=matrix&layer=2&head=2&query=3")
    tab.set_default_timeout(5000)
    entries, weights = lookup.entries[0, 1, 3].tolist(), lookup.weights[0, 1, 3].tolist()
    assert taken(tab) == {entry: pytest.approx(weight, abs=1e-5) for entry, weight in zip(entries, weights)}
    for entry in entries:
        row = tab.locator(f".lookup tr[data-entry='{entry}'] td")
        assert row.nth(1).inner_text() == f"[{int(IDS[0, entry])}]"
    assert f"{STORE}; 3 of 18" in tab.locator(".lookup caption").inner_text()
    assert tab.locator(".lookup canvas.places").count() == 0
