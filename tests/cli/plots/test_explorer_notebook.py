"""`explore(model, what)`: what a notebook shows, in a frame in a real browser, and what a file keeps."""

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page
from torch.nn.functional import cross_entropy

from polyformer import InputError, create_model, from_pretrained
from polyformer.cli.plots.explorer import Explorer, Reading, explore
from polyformer.cli.plots.explorer.calls import measure_call
from polyformer.cli.plots.explorer.notebook import reading, with_effects
from polyformer.cli.plots.explorer.record import recorded_calls
from polyformer.data import Tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "<s>", "</s>"]
IDS = [0, 1, 2, 3, 4, 5, 1]
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def ours(preset: str = "decoder-tiny", **options: Any) -> Any:
    torch.manual_seed(0)
    return create_model(preset, **{"vocab_size": len(WORDS), **SIZE, **options}).eval()


def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=16, intermediate_size=16, **SIZE)
    return transformers.BertModel(config).eval()


def test_a_notebook_shows_the_page_in_a_frame(opened: Callable[..., Page], tmp_path: Path):
    model = ours()
    weights = measure_call(recorded_calls(model, {"input_ids": torch.tensor([IDS])})[0]).weights()[0, -1]
    notebook = tmp_path / "notebook.html"
    shown = explore(model, IDS)._repr_html_()
    notebook.write_text(f"<!DOCTYPE html><meta charset='utf-8'><p>A cell:</p>{shown}", encoding="utf-8")
    tab = opened(notebook)
    frame = tab.frame_locator("iframe")
    frame.get_by_role("tab", name="Matrix").click()
    script = "rows => rows.map(row => [Number(row.dataset.key), Number(row.dataset.weight)])"
    frame.locator("table.keys tbody tr").first.wait_for()
    for key, weight in frame.locator("table.keys tbody tr").evaluate_all(script):
        assert weight == pytest.approx(float(weights[int(key)]), abs=1e-5)
    frame.locator("#head").select_option("1")
    frame.get_by_role("tab", name="Neuron").click()
    assert frame.locator("tr[data-term=weight]").count() == 1
    reached = "() => { try { return parent.document.title } catch (error) { return error.name } }"
    assert tab.frames[1].evaluate(reached) == "SecurityError", "the page reaches nothing of the notebook"


def test_the_frame_holds_the_page_that_is_saved(tmp_path: Path):
    page = explore(ours(), torch.tensor([IDS]), title='</iframe><script>"&amp;')
    assert isinstance(page, Explorer)
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page.html
    frame = page._repr_html_()
    inside = frame.split('srcdoc="')[1].split('"')[0]
    assert html.unescape(inside) == page.html
    assert frame.count("<") == 2
    assert 'sandbox="allow-scripts allow-downloads"' in frame
    assert "save(path)" in repr(page)


def test_a_loaded_model_has_its_tokenizer(tmp_path: Path):
    model, tokenizer = ours("decoder-tiny"), Tokenizer.of_words(WORDS)
    with pytest.raises(InputError, match="tokenizer: a text requires a tokenizer"):
        explore(model, "the cat sat")
    assert "cat" in "".join(reading(model, "the cat", tokenizer, {}).tokens["decoder"])
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert [*reading(loaded, "the cat sat", None, {}).tokens["decoder"]][-2:] == ["cat", "sat"]
    assert reading(loaded, IDS, None, {}).tokens["decoder"] == [WORDS[i] for i in IDS]
    assert reading(model, IDS, None, {}).tokens["decoder"] == [f"[{i}]" for i in IDS]


@pytest.mark.parametrize(
    "what", [IDS, [IDS], torch.tensor(IDS), np.array([IDS]), {"input_ids": torch.tensor([IDS])}]
)
def test_ids_come_in_any_form(what: Any):
    for model in (ours(), theirs()):
        assert reading(model, what, None, {}).inputs["input_ids"].tolist() == [IDS]


def test_an_encoder_decoder_and_a_model_of_transformers_are_read():
    both = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([[6, 1, 2]])}
    read = reading(ours("transformer-tiny"), both, None, {})
    assert read.inputs["decoder_input_ids"].tolist() == [[6, 1, 2]]
    assert "encoder layer 2" in explore(theirs(), IDS).html
    with pytest.raises(
        InputError, match="tokenizer: the model was loaded from no folder that holds one; give tokenizer="
    ):
        explore(theirs(), "the cat")


def test_two_models_or_two_texts_are_compared():
    model = ours()
    again = Reading(
        name="mine", model=model, inputs={"input_ids": torch.tensor([IDS])}, tokens={"decoder": WORDS[:6]}
    )
    for against in (ours(num_hidden_layers=1), IDS[::-1], again):
        assert explore(model, IDS, against=against).html.count('"sites"') == 2


def test_effects_of_heads_are_on_the_page_of_a_decoder():
    model = ours()
    shown = with_effects(reading(model, IDS, None, {}))
    assert shown.effects is not None
    losses, rises = shown.effects
    logits = model(torch.tensor([IDS])).logits[0, :-1]
    torch.testing.assert_close(losses, cross_entropy(logits, torch.tensor(IDS[1:]), reduction="none"))
    assert rises.shape == (2, 2, len(IDS) - 1)
    header = (
        explore(model, IDS, effects=True).html.partition('id="explorer-data">')[2].partition("</script>")[0]
    )
    assert json.loads(header)["runs"][0]["effects"]["rises"]["shape"] == [2, 2, len(IDS) - 1]
    with pytest.raises(InputError, match="expected a causal language model"):
        explore(ours("encoder-tiny"), IDS, effects=True)


def test_images_are_told_from_ids():
    model, levels = ours(vocab_size=17), np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    for image in (levels, Image.fromarray(levels)):
        read = reading(model, image, None, {})
        assert read.inputs["input_ids"].tolist() == [[16, *(levels.ravel().astype(int) * 16 // 256)]]
        assert read.picture is not None


@pytest.mark.parametrize("what", [None, [], [[]], [IDS, IDS], 3.5, ["the"], torch.zeros(1, 4, 4)])
def test_an_input_that_is_no_text_ids_or_image_is_refused(what: Any):
    with pytest.raises(InputError, match="what: expected a text, the ids of one row of tokens, or an image"):
        explore(ours(), what)
