"""The buttons that save pictures, of pages that are opened as files, without a network."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from explorer_pages import HOSTILE, Attention, page, run, site, stored, text
from PIL import Image
from playwright.sync_api import Locator, Page

from polyformer.cli.plots.explorer.calls import Buffers
from polyformer.cli.plots.report.mistakes import image_element
from polyformer.cli.plots.report.page import Series, figure, line_chart, section
from polyformer.cli.plots.report.page import page as report_page

SVG = "{http://www.w3.org/2000/svg}"
LENGTH, HEADS = 12, 3
PIXELS = np.random.default_rng(0).integers(0, 256, (12, 16, 3)).astype(np.uint8)
PREDICTION = {"labels": [{"name": HOSTILE[1], "probability": 0.75}, {"name": "cat", "probability": 0.25}]}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a text with hostile tokens."""
    buffers = Buffers()
    sites = [Attention(layer, HEADS, LENGTH).site(layer, buffers) for layer in range(2)]
    tokens = [*HOSTILE, *text(LENGTH)][:LENGTH]
    path = tmp_path_factory.mktemp("words") / "page.html"
    content = page(run({"decoder": tokens}, sites), buffers=buffers, title="../a <b>: c")
    path.write_text(content, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a picture of 3 x 4 patches, with a prediction."""
    buffers = Buffers()
    names = ["class", *(f"row {i // 4}, column {i % 4}" for i in range(12))]
    weights = np.random.default_rng(1).dirichlet(np.ones(13), size=(2, 13))
    facts: dict[str, Any] = {"stack": "encoder", "queries": "encoder", "keys": "encoder"}
    image = site(0, weights, buffers, **facts, detail=stored(weights, buffers))
    size = {"height": 12, "width": 16, "channels": 3, "patch": [4, 4], "first": 1, "tokens": 1, "patches": {}}
    pixels = {**size, "data": buffers.add(PIXELS)}
    prediction = {**PREDICTION, "label": "cat"}
    path = tmp_path_factory.mktemp("picture") / "page.html"
    content = page(run({"encoder": names}, [image], pixels=pixels, prediction=prediction), buffers=buffers)
    path.write_text(content, encoding="utf-8")
    return path


def saved(tab: Page, button: Locator) -> tuple[str, bytes]:
    """The name and the content of the file that a button saves."""
    with tab.expect_download() as download:
        button.click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def svg_of(content: bytes) -> ElementTree.Element:
    root = ElementTree.fromstring(content)
    assert root.tag == f"{SVG}svg"
    ground = root[0]
    assert [ground.get(name) for name in ("width", "height")] == [root.get("width"), root.get("height")]
    return root


def png_of(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("view", ["lines", "neuron", "distance"])
def test_a_drawing_is_saved_as_svg(opened: Open, words: Path, view: str):
    tab = opened(words, f"view={view}&query=9")
    buttons = tab.get_by_role("group", name="Save pictures").get_by_role("button")
    assert buttons.count() == {"lines": 1, "neuron": 3, "distance": HEADS}[view]
    name, content = saved(tab, buttons.last)
    assert name.startswith(f"a-b-c-{view}-")
    assert name.endswith(".svg")
    root = svg_of(content)
    drawn = [each for each in root.iter() if each.tag in (f"{SVG}path", f"{SVG}text", f"{SVG}rect")][1:]
    assert len(drawn) > 10
    for element in drawn:  # the style sheet is not in the file
        assert element.get("fill", "").startswith(("rgb(", "none"))
    assert not list(root.iter(f"{SVG}script"))
    if view == "lines":
        assert tab.locator("svg.lines path").count() == len(list(root.iter(f"{SVG}path")))


@pytest.mark.parametrize("view", ["overview", "matrix", "path"])
def test_a_canvas_is_saved_as_png(opened: Open, words: Path, view: str):
    tab = opened(words, f"view={view}&query=9", color_scheme="dark")
    tab.wait_for_selector({"overview": ".overview canvas"}.get(view, "canvas[data-ready=true]"))
    name, content = saved(tab, tab.get_by_role("group", name="Save pictures").get_by_role("button"))
    assert name.endswith(".png")
    pixels = png_of(content)
    assert min(pixels.shape[:2]) > 100
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
    assert pixels[-1, 0].tolist() == [18, 22, 28]  # the ground of the dark page


def test_a_picture_opens_plain_with_its_prediction(opened: Open, picture: Path):
    tab = opened(picture)
    assert tab.get_by_role("tab", name="Picture").get_attribute("aria-selected") == "true"
    toggle = tab.get_by_role("button", name="Weights over the picture")
    assert toggle.get_attribute("aria-pressed") == "false"
    said = tab.locator(".prediction")
    assert said.locator("p").inner_text() == f"Prediction: {HOSTILE[1]}; its label is cat."
    shares = said.locator("tr").evaluate_all("rows => rows.map((row) => Number(row.dataset.probability))")
    assert shares == [0.75, 0.25]
    assert tab.evaluate("window.ran") is None
    assert np.array_equal(centres(tab), PIXELS)
    tab.locator("canvas.picture").click()
    assert toggle.get_attribute("aria-pressed") == "true"
    assert "overlay=1" in tab.evaluate("location.hash")
    assert not np.array_equal(centres(tab), PIXELS)
    toggle.click()
    tab.get_by_role("tab", name="Matrix").focus()
    assert np.array_equal(centres(tab), PIXELS)


def centres(tab: Page) -> np.ndarray:
    """The colours in the middle of each pixel, in the file that is saved."""
    name, content = saved(tab, tab.get_by_role("button", name="Save picture (PNG)"))
    assert name == "A-page-of-known-numbers-picture-picture.png"
    pixels = png_of(content)
    height, width = PIXELS.shape[:2]
    rows = ((np.arange(height) + 0.5) * len(pixels) / height).astype(int)
    columns = ((np.arange(width) + 0.5) * pixels.shape[1] / width).astype(int)
    return pixels[rows][:, columns]


def test_figures_of_a_report_are_saved(opened: Open, tmp_path: Path):
    chart = line_chart("loss", [Series("own", [(1, 2.5), (2, 2.0)])], "step", "loss")
    parts = figure(chart), figure(image_element(PIXELS, HOSTILE[1]), HOSTILE[1])
    path = tmp_path / "report.html"
    path.write_text(
        report_page("A run", "of a test", [section("Both", "Pictures.", *parts)]), encoding="utf-8"
    )
    tab = opened(path)
    name, content = saved(tab, tab.get_by_role("button", name="Save SVG"))
    assert name == "A-run-Both-1.svg"
    root = svg_of(content)
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("stroke") == "rgb(31, 90, 140)"
    name, content = saved(tab, tab.get_by_role("button", name="Save PNG"))
    assert name == "A-run-img-src-x-onerror-window-ran-1-2.png"
    assert png_of(content).shape[2] == 3
    assert tab.evaluate("window.ran") is None
