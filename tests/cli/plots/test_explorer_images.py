"""Images in the explorer: a model of pixels and a vision model of transformers, from a file to the page."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from explorer_pages import place
from PIL import Image
from playwright.sync_api import Page

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.cli.plots.explorer import Reading, page_of
from polyformer.cli.plots.explorer.calls import measure_call
from polyformer.cli.plots.explorer.images import TransformersImages, pixels_reading
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.data import TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes.recipe import Recipe, find_recipe, merged
from polyformer.training.recipes.run import Run

HEIGHT, WIDTH, LEVELS = 4, 6, 5
GREY, COLOURS = (HEIGHT, WIDTH), (HEIGHT, WIDTH, 3)


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def run_of(folder: Path, shape: tuple[int, ...]) -> Run:
    """A run that ended before its first step."""
    task = {"kind": "image", "levels": LEVELS, "height": HEIGHT, "width": WIDTH, "channels": (*shape, 1)[2]}
    small = {"preset": "decoder-tiny", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {**small, "position": {"kind": "grid", "shape": [*shape]}, "pattern": None}
    recipe = Recipe.from_dict(merged(find_recipe("image"), {"task": task, "model": model}))
    tokenizer = recipe.task.tokenizer(TokenizerConfig(), [])
    options = {name: value for name, value in model.items() if name != "preset"}
    torch.manual_seed(0)
    built = Transformer(recipe.task.build(tokenizer).adapt(model_config("decoder-tiny", options))).eval()
    run = Run(folder)
    folder.mkdir()
    run.begin(recipe, tokenizer, built)
    built.save_pretrained(folder)
    run.record(steps=0)
    return run


@pytest.mark.parametrize("shape", [GREY, COLOURS])
def test_each_level_of_each_pixel_is_a_token(tmp_path: Path, shape: tuple[int, ...]):
    model, image = run_of(tmp_path / "run", shape).model("cpu"), pixels(*shape)
    reading = pixels_reading("digits", model, image)
    levels = image.reshape(-1).astype(int) * LEVELS // 256
    assert reading.inputs["input_ids"].tolist() == [[LEVELS, *levels]]
    assert len(reading.tokens["decoder"]) == 1 + image.size
    assert reading.tokens["decoder"][-1].startswith("row 3 col 5")
    assert reading.picture is not None
    assert (reading.picture.first, reading.picture.tokens) == (1, (*shape, 1)[2])
    np.testing.assert_array_equal(reading.picture.pixels.reshape(-1), levels * 255 // (LEVELS - 1))
    with torch.no_grad():
        expected = model(reading.inputs["input_ids"], output_attentions=True).attentions
    for call, weights in zip(recorded_calls(model, reading.inputs), expected, strict=True):
        torch.testing.assert_close(measure_call(call).weights(), weights[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (pixels(5, 6), "image: this model reads images of 4 x 6, got one of 5 x 6"),
        (pixels(4, 6, 3), "image: this model reads images of 4 x 6, got one of 4 x 6 x 3"),
        (pixels(4, 6).astype(float), r"image: expected uint8 \[H, W\] or .*, got float64 \[4, 6\]"),
        (pixels(4, 6, 2), r"got uint8 \[4, 6, 2\]"),
        (pixels(0, 6), "image: expected uint8"),
    ],
)
def test_images_of_another_form_are_refused(tmp_path: Path, image: np.ndarray, said: str):
    with pytest.raises(InputError, match=said):
        pixels_reading("digits", run_of(tmp_path / "run", GREY).model("cpu"), image)


def vision(**options: Any) -> TransformersImages:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(image_size=24, patch_size=8, **size)).eval()
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return TransformersImages("vit", model, ViTImageProcessorPil(size={"height": 24, "width": 24}, **options))


def test_patches_of_a_vision_model_are_tokens():
    image = pixels(24, 24, 3)
    for options in (
        {},
        {"do_normalize": False},
        {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
    ):
        reading = vision(**options).of_pixels(image)
        assert reading.picture is not None
        assert (reading.picture.patch, reading.picture.first) == ((8, 8), 1)
        np.testing.assert_allclose(reading.picture.pixels.astype(int), image, atol=1)
    assert reading.tokens["encoder"][:3] == ["class", "row 0 col 0", "row 0 col 1"]
    (call, _) = recorded_calls(reading.model, reading.inputs)
    assert measure_call(call).shape == (2, 10, 10)
    grey = vision().of_pixels(pixels(30, 40))
    assert grey.inputs["pixel_values"].shape == (1, 3, 24, 24)


def test_a_vision_model_without_patches_is_refused():
    other = vision()
    config, other.model.config = other.model.config, SimpleNamespace()
    with pytest.raises(InputError, match="ViTModel does not say how large its patches are"):
        other.of_pixels(pixels(24, 24))
    other.model.config, config.patch_size = config, 2
    with pytest.raises(InputError, match="the tokens of ViTModel are no patches of one size, 12 x 12"):
        other.of_pixels(pixels(24, 24))


def shown(tab: Page) -> dict[int, float]:
    script = "rows => rows.map(row => [Number(row.dataset.key), Number(row.dataset.weight)])"
    return {int(key): weight for key, weight in tab.locator("table.keys tbody tr").evaluate_all(script)}


def saved_page(reading: Reading, folder: Path) -> tuple[Path, np.ndarray]:
    """The page, and the weights [H, T, T] of its last layer."""
    path = folder / "page.html"
    path.write_text(page_of(reading), encoding="utf-8")
    return path, measure_call(recorded_calls(reading.model, reading.inputs)[-1]).weights().numpy()


def test_a_colour_is_pinned_on_the_picture(opened: Callable[..., Page], tmp_path: Path):
    model = run_of(tmp_path / "run", COLOURS).model("cpu")
    page, weights = saved_page(pixels_reading("own", model, pixels(*COLOURS)), tmp_path)
    tab = opened(page, "view=picture&layer=2&head=2&query=0")
    canvas = tab.locator("canvas.picture")
    box = canvas.bounding_box()
    assert box is not None
    canvas.click(position={"x": box["width"] * 2.5 / WIDTH, "y": box["height"] * 3.5 / HEIGHT})
    token = 1 + (3 * WIDTH + 2) * 3
    assert f"query={token}" in place(tab)
    for key, weight in shown(tab).items():
        assert weight == pytest.approx(weights[1, token, key], abs=1e-5)
    together = weights[1, token, 1:].reshape(-1, 3).sum(1)
    assert f"patch is {together.max():.4f}"[:-1] in tab.locator("output.readout").inner_text()
    tab.get_by_role("button", name="row 3 col 2 blue").click()
    assert f"query={token + 2}" in place(tab)
    canvas.focus()
    tab.keyboard.press("ArrowUp")
    assert f"query={token + 2 - 3 * WIDTH}" in place(tab)


def test_a_patch_of_a_vision_model_is_pinned(opened: Callable[..., Page], tmp_path: Path):
    page, weights = saved_page(vision().of_pixels(pixels(48, 30, 3)), tmp_path)
    tab = opened(page, "view=picture&layer=2&head=1&query=5")
    assert "patch in row 1, column 1" in tab.locator("output.readout").inner_text()
    assert {key: pytest.approx(weights[0, 5, key], abs=1e-5) for key in range(10)} == shown(tab)
    tab.get_by_role("button", name="class").click()
    assert "a token that is no patch" in tab.locator("output.readout").inner_text()


def test_the_command_reads_files_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run", GREY)
    Image.fromarray(pixels(40, 60, 3)).save("photo.png")
    (tmp_path / "hello.png").write_text("hello")
    assert main(["explore", "run", "photo.png", "--out", "page.html"]) == 0
    assert "photo.png" in (tmp_path / "page.html").read_text()
    assert main(["explore", "run", "--row", "2", "--against", "photo.png"]) == 0
    for words, said in [
        (["hello.png"], "hello.png: not an image"),
        (["absent.png"], "absent.png: no such file"),
        (["photo.png", "--row", "2"], "--row: photo.png is a single image; leave out --row"),
        (["--row", "99999"], "--row: the default data has fewer than 99999 images"),
        (["photo.png", "--row", "0"], "--row: expected 1 or more, got 0"),
        (
            ["photo.png", "--generate", "4"],
            "--generate: only for models of texts, and this model reads images",
        ),
    ]:
        assert_refused(["explore", "run", *words], said)
    assert_refused(["explore", "encoder-tiny", "--row", "1"], "--row: only for image models")


def assert_refused(words: list[str], said: str) -> None:
    import contextlib
    import io

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        assert main(words) == 2
    assert said in errors.getvalue()
    assert errors.getvalue().count("\n") == 1
