"""The explorer's page in a real browser, offline: what it shows is what numpy computes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from explorer_pages import HOSTILE, Attention, long_site, page, place, run, site, stored, text
from playwright.sync_api import Locator, Page, expect

from polyformer.cli.plots.explorer.calls import Buffers

LENGTH, HEADS = 24, 4
LAYERS = [
    Attention(0, HEADS, LENGTH),
    Attention(1, HEADS, LENGTH, 6, key_heads=2),
    Attention(2, HEADS, LENGTH, position=True),
]
OTHER = Attention(9, HEADS, LENGTH)
MIX = np.tril(np.random.default_rng(5).normal(size=(HEADS, LENGTH, LENGTH))) / 6
LOSSES = np.random.default_rng(6).exponential(size=LENGTH - 1).astype(np.float32)
RISES = np.random.default_rng(7).normal(size=(4, HEADS, LENGTH - 1)).astype(np.float32)
PROMPT, LONG, WINDOW = 15, 16384, 256
VIEWS = ["overview", "matrix", "lines", "neuron", "distance", "path", "steps", "effects", "compare"]
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages by name."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {"known": known_page(), "long": long_page(), "hostile": hostile_page(), "picture": picture_page()}
    for name, content in pages.items():
        (folder / f"{name}.html").write_text(content, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def show(opened: Open, files: dict[str, Path]) -> Open:
    """`show("known", "view=matrix")`: the page of that name."""
    return lambda name, place="", **options: opened(files[name], place, **options)


def known_page() -> str:
    buffers = Buffers()
    labels = np.arange(LENGTH, dtype=np.int16)[None] % 5 - 1
    marks = [{"name": "bucket", "of": "tokens", "names": [], "values": buffers.add(labels)}]
    sites = [layer.site(i, buffers, marks=marks if i == 0 else []) for i, layer in enumerate(LAYERS)]
    sites.append(site(3, MIX, buffers, mechanism="performer", detail=stored(MIX, buffers)))
    words = {"decoder": text(LENGTH)}
    other = run(words, [OTHER.site(0, buffers, "float16")], name="other", prompt=PROMPT)
    effects = {"losses": buffers.add(LOSSES), "rises": buffers.add(RISES)}
    return page(run(words, sites, prompt=PROMPT, effects=effects), other, buffers=buffers)


def long_page() -> str:
    buffers = Buffers()
    sites = [long_site(layer, LONG, WINDOW, buffers) for layer in range(2)]
    return page(run({"decoder": text(LONG)}, sites), buffers=buffers)


def hostile_page() -> str:
    buffers = Buffers()
    attention = Attention(3, 2, len(HOSTILE))
    sites = [attention.site(i, buffers, pattern=HOSTILE[0], mechanism=HOSTILE[1]) for i in range(2)]
    effects = {"losses": buffers.add(LOSSES[: len(HOSTILE) - 1]), "rises": buffers.add(RISES[:2, :2])}
    facts: dict[str, Any] = {"prompt": 2, "notes": HOSTILE[:4], "effects": effects}
    runs = [run({"decoder": HOSTILE}, sites, name, **facts) for name in HOSTILE[:2]]
    return page(*runs, buffers=buffers, title=HOSTILE[1])


def picture_page() -> str:
    buffers = Buffers()
    data = np.random.default_rng(0).integers(0, 256, (12, 16, 1)).astype(np.uint8)
    names = ["class", *(f"row {i // 4}, column {i % 4}" for i in range(12))]
    weights = np.random.default_rng(1).dirichlet(np.ones(13), size=(2, 13))
    size = {"height": 12, "width": 16, "channels": 1, "patch": [4, 4], "first": 1, "tokens": 1, "patches": {}}
    image = site(
        0,
        weights,
        buffers,
        stack="encoder",
        queries="encoder",
        keys="encoder",
        detail=stored(weights, buffers),
    )
    pixels = {**size, "data": buffers.add(data)}
    return page(run({"encoder": names}, [image], pixels=pixels), buffers=buffers)


def numbers(rows: Locator, *names: str) -> np.ndarray:
    """The data attributes of elements, a row for each."""
    script = "(rows, names) => rows.map((row) => names.map((name) => Number(row.dataset[name])))"
    return np.array(rows.evaluate_all(script, list(names)))


def drawn(tab: Page, cells: list[tuple[int, int]], canvas: str = ".grid canvas") -> np.ndarray:
    """The colours at the middle of (query, key) cells that are on the screen, [cells, 3]."""
    tab.wait_for_selector(f"{canvas}[data-ready=true]")
    script = """(canvas, cells) => {
        const [left, above, size] = canvas.dataset.origin.split(" ").map(Number);
        const box = canvas.closest(".grid");
        const { width, height } = canvas;
        const pen = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
        pen.drawImage(canvas, 0, 0);
        const { data } = pen.getImageData(0, 0, width, height);
        return cells.map(([query, key]) => {
            const x = Math.floor(left + (key + 0.7) * size - box.scrollLeft);
            const y = Math.floor(above + (query + 0.7) * size - box.scrollTop);
            const at = 4 * (y * width + x);
            return [...data.slice(at, at + 3)];
        });
    }"""
    return np.array(tab.locator(canvas).first.evaluate(script, [[int(i), int(j)] for i, j in cells]))


@pytest.mark.parametrize(("layer", "head", "query"), [(0, 0, 23), (1, 3, 17), (2, 2, 11)])
def test_weights_in_the_page_are_those_of_numpy(show: Open, layer: int, head: int, query: int):
    tab = show("known", f"view=matrix&layer={layer + 1}&head={head + 1}&query={query}")
    expected = LAYERS[layer].lse_and_weights()[1][head, query]
    shown = numbers(tab.locator("table.keys tbody tr"), "key", "weight")
    keys = shown[:, 0].astype(int)
    np.testing.assert_allclose(shown[:, 1], expected[keys], atol=1e-3)
    np.testing.assert_allclose(shown[:, 1], np.sort(expected)[::-1][: len(keys)], atol=1e-3)
    below = [(query, key) for key in sorted(keys, key=lambda key: expected[key])]
    light = drawn(tab, below).sum(-1)
    assert (np.diff(light) <= 2).all(), "on a light page the greater weight is the darker"
    hidden = drawn(tab, [(4, key) for key in range(5, 24)])
    assert np.ptp(hidden, axis=-1).max() <= 2, "what is not computed is grey"


def test_the_neuron_view_adds_up(show: Open):
    tab = show("known", "view=neuron&layer=3&head=2&query=20&key=7")
    layer = LAYERS[2]
    lse, weights = layer.lse_and_weights()
    shown = {
        row.get_attribute("data-term"): float(row.get_attribute("data-value") or "nan")
        for row in tab.locator("tr[data-term]").all()
    }
    dot = layer.q[1, 20] @ layer.k[1, 7]
    score = layer.scores()[1, 20, 7]
    at = np.arange(LENGTH)
    positions = [term[1, 20, 7] for term in layer.terms(np.clip(at[:, None] - at - layer.first, 0, 8))]
    expected = [dot, dot * layer.scale, *positions, score, lse[1, 20], weights[1, 20, 7]]
    np.testing.assert_allclose(list(shown.values()), expected, atol=1e-4)
    terms = [shown[name] for name in ("scaled", "position-1", "position-2", "position-3")]
    assert shown["score"] == pytest.approx(sum(terms))
    assert shown["weight"] == pytest.approx(np.exp(shown["score"] - shown["lse"]))
    assert tab.locator("svg[data-id=product] rect").count() == layer.q.shape[-1]
    tab.locator("tr[data-key]").nth(3).hover()
    hovered = float(tab.locator("tr[data-key]").nth(3).get_attribute("data-weight") or "nan")
    assert float(tab.locator("tr[data-term=weight]").get_attribute("data-value") or "nan") == pytest.approx(
        hovered
    )


def test_lines_are_weights_and_heads_are_switched(show: Open):
    tab = show("known", "view=lines&layer=2&head=1&query=9")
    weights = LAYERS[1].lse_and_weights()[1]
    links = numbers(tab.locator(".links path"), "head", "q", "k", "weight")
    at = links[:, :3].astype(int).T
    np.testing.assert_allclose(links[:, 3], weights[tuple(at)], atol=1e-3)
    assert len(links) == (weights[0] >= 0.01).sum()
    tab.get_by_role("button", name="head 3").click()
    assert {*numbers(tab.locator(".links path"), "head")[:, 0]} == {0, 2}
    tab.locator("[data-query='12']").click()
    assert "query=12" in place(tab)
    assert {*numbers(tab.locator(".links path:not(.faded)"), "q")[:, 0]} == {12}


def test_distances_and_the_path_and_steps(show: Open):
    tab = show("known", "view=distance&layer=1&head=1")
    shares = numbers(tab.locator("[data-head='0'] rect"), "share")[:, 0]
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    weights = LAYERS[0].lse_and_weights()[1]
    nearest = [weights[0][distance == d].sum() / LENGTH for d in range(3)]
    np.testing.assert_allclose(shares[:3], nearest, atol=1e-5)
    assert shares.sum() == pytest.approx(1)

    tab.get_by_role("tab", name="Path").click()
    tab.wait_for_selector("canvas.lanes[data-ready=true]")
    expected = np.eye(LENGTH)[23]
    for matrix in [np.abs(MIX), *(layer.lse_and_weights()[1] for layer in reversed(LAYERS))]:
        mean = matrix.sum(0)
        expected = expected @ (0.5 * mean / mean.sum(-1, keepdims=True) + 0.5 * np.eye(LENGTH))
    rows = numbers(tab.locator("tr[data-token]"), "token", "share")
    np.testing.assert_allclose(rows[:, 1], expected[rows[:, 0].astype(int)], atol=1e-3)

    tab.get_by_role("tab", name="Steps").click()
    tab.get_by_label("Generated token").focus()
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowRight")
    words = numbers(tab.locator(".text [data-token]"), "weight")[:, 0]
    np.testing.assert_allclose(words, weights[0, PROMPT, : PROMPT + 1], atol=1e-3)
    assert tab.locator("[data-next]").get_attribute("data-next") == str(PROMPT + 1)


def test_effects_are_of_the_chosen_token(show: Open):
    tab = show("known", "view=effects&query=4")
    tab.locator("[data-effect=token-9]").click()
    expect(tab.locator("[data-effect=token-9]")).to_have_attribute("aria-pressed", "true")
    expect(tab.locator(".readout")).to_contain_text(f"has the probability {np.exp(-LOSSES[8]):.3f}")
    cells = tab.locator(".effects button")
    np.testing.assert_allclose(numbers(cells, "rise").reshape(4, HEADS), RISES[:, :, 8], rtol=1e-6)
    without = f"→ {np.exp(-LOSSES[8] - RISES[2, 1, 8]):.3f}"
    tab.get_by_role("button", name=re.compile(f"^Layer 3, head 2: .*{without}$")).click()
    assert "view=matrix" in place(tab)
    assert "layer=3&head=2&query=8" in place(tab)


def test_two_runs_are_compared(show: Open):
    tab = show("known", "view=compare&layer=1&head=2&query=20&key=9")
    a, b = (attention.lse_and_weights()[1][1] for attention in (LAYERS[0], OTHER))
    difference = a - b
    tab.locator(".grid canvas[data-ready=true]").nth(2).wait_for()
    said = tab.locator("output.readout").inner_text()
    figures = [float(part.split()[-1].replace("\u2212", "-")) for part in said.split(":")[-1].split(",")]
    np.testing.assert_allclose(figures, [a[20, 9], b[20, 9], difference[20, 9]], atol=1e-3)
    cells = [(int(i), int(j)) for i, j in np.argwhere(np.abs(difference) > 0.1) if i != 20 and j != 9]
    colors = drawn(tab, cells, "[data-side='2'] canvas").astype(int)
    warm = colors[:, 0] > colors[:, 2]
    assert (warm == [difference[cell] > 0 for cell in cells]).all(), "red where A is greater, blue where B is"


def test_a_long_page_is_small_and_computes_what_is_on_the_screen(show: Open, files: dict[str, Path]):
    assert files["long"].stat().st_size < 20e6
    tab = show("long", "view=matrix&query=9000&layer=2")
    canvas, grid = tab.locator(".grid canvas"), tab.locator(".grid")
    tab.wait_for_selector(".grid canvas[data-ready=true]")
    rows = [int(end) for end in (canvas.get_attribute("data-rows") or "").split("-")]
    computed = [int(end) for end in (canvas.get_attribute("data-computed") or "").split("-")]
    assert rows[0] <= 9000 <= rows[1]
    assert rows[0] - 64 <= computed[0] <= computed[1] <= rows[1] + 64
    grid.evaluate("grid => grid.scrollBy(500, 500)")
    expect(canvas).not_to_have_attribute("data-rows", f"{rows[0]}-{rows[1]}")
    seen = drawn(tab, [(9300, 9200), (9300, 9000)]).astype(int)
    assert np.ptp(seen[0]) > 10 or seen[0].sum() < 100
    assert np.ptp(seen[1]) <= 2, "outside of the window nothing is computed"
    random = np.random.default_rng(1)
    q, k = random.integers(-127, 128, size=(2, 4, LONG, 32)).astype(np.int8) * np.float32(0.01)
    weight = np.exp(0.5 * k[0, 8900] @ q[0, 9000] - np.log(WINDOW))
    tab.evaluate("location.hash = 'view=neuron&query=9000&key=8900&layer=2'")
    shown = tab.locator("tr[data-term=weight]").get_attribute("data-value")
    assert float(shown or "nan") == pytest.approx(weight, rel=1e-3)


def test_hostile_tokens_are_shown_and_never_run(show: Open):
    tab = show("hostile", "query=11")
    for number, view in enumerate(VIEWS):
        tab.keyboard.press(str(number + 1))
        assert f"view={view}" in place(tab)
    tab.evaluate("location.hash = 'view=lines&query=11'")
    labels = tab.locator("[data-key]").evaluate_all(
        "words => words.map((word) => word.getAttribute('aria-label'))"
    )
    everything = "\n".join(label for label in labels if label)
    for sign in [
        "</script><script>",
        "<img src=x onerror",
        "U+202E",
        "␀␇␛",
        "😀",
        "◌\u0301",
        "&lt;b&gt;",
        "U+D800",
        "∅",
        "␣",
    ]:
        assert sign in everything
    assert tab.evaluate("window.ran") is None
    assert tab.locator("img").count() == 0
    assert tab.locator("header h1").inner_text() == HOSTILE[1]


def test_the_keyboard_reaches_and_works_every_view(show: Open):
    tab = show("known", "view=overview&layer=1&head=1")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    for view in VIEWS[1:]:
        tab.keyboard.press("ArrowRight")
        assert f"view={view}" in place(tab)
        assert tab.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    tab.keyboard.press("Home")
    for _ in range(5):
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.dataset.head") == "0"
    for key in ["ArrowDown", "ArrowRight", "Enter"]:
        tab.keyboard.press(key)
    assert "view=matrix&run=1&part=decoder-self&layer=2&head=2" in place(tab)
    tab.locator(".grid").focus()
    for key in ["Home", "ArrowDown", "ArrowDown", "Enter", "+"]:
        tab.keyboard.press(key)
    assert "query=2&key=" in place(tab)
    assert "zoom=" in place(tab)
    assert "query 2" in tab.locator("output.readout").inner_text()


def test_links_lead_back_and_pages_are_light_or_dark(show: Open):
    tab = show("known", "view=matrix&layer=2&head=3&query=17", color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(paper) == "rgb(18, 22, 28)"
    tab.get_by_role("button", name="Light page").click()
    assert tab.evaluate(paper) == "rgb(251, 251, 250)"
    assert tab.locator("#query").input_value() == "17"
    assert [tab.locator(f"#{name}").input_value() for name in ("layer", "head")] == ["1", "2"]
    tab.locator("#head").select_option("0")
    tab.get_by_role("tab", name="Neuron").click()
    tab.go_back()
    assert tab.get_by_role("tab", name="Matrix").get_attribute("aria-selected") == "true"
    tab.go_back()
    assert tab.locator("#head").input_value() == "2"
    tab.evaluate("location.hash = 'view=nothing&layer=-4&head=99&query=1e9&run=7'")
    assert tab.locator("#head").input_value() == str(HEADS - 1)


def test_a_patch_is_pinned_on_a_picture(show: Open):
    tab = show("picture", "view=picture&query=0")
    tab.locator("canvas.picture").click()
    assert "query=7" in place(tab) or "query=11" in place(tab)
    tab.locator("canvas.picture").focus()
    tab.keyboard.press("ArrowUp")
    assert "patch in row" in tab.locator("output.readout").inner_text()
    assert tab.locator("table.keys tbody tr").count() == 12
