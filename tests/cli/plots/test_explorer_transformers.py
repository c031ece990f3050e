"""Models of transformers in the explorer: CLIP's two parts, Swin's windows, and errors of one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from explorer_pages import place
from PIL import Image
from playwright.sync_api import Page
from torch import Tensor
from transformers.models.swin import modeling_swin

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.cli.plots.explorer import page_of
from polyformer.cli.plots.explorer.calls import measure_call
from polyformer.cli.plots.explorer.images import TransformersImages
from polyformer.cli.plots.explorer.notebook import reading
from polyformer.cli.plots.explorer.record import recorded_calls
from tolerances import Double

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def pixels(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8)


def processor(height: int, width: int) -> Any:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": height, "width": width})


def clip() -> Any:
    torch.manual_seed(0)
    text = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1, **SIZE}
    vision = {"image_size": 24, "patch_size": 8, **SIZE}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    return transformers.CLIPModel._from_config(config, attn_implementation="eager").eval()


def test_clip_reads_images_and_texts_by_its_parts():
    model = clip()
    seen = reading(model, pixels(40, 30), processor(24, 24), {})
    read = reading(model, [3, 4, 5, 6], None, {})
    assert seen.picture is not None
    assert len(seen.tokens["encoder"]) == 1 + 9
    with torch.no_grad():
        expected = model.vision_model(**seen.inputs, output_attentions=True).attentions
        of_text = model.text_model(**read.inputs, output_attentions=True).attentions
    for reads, own in ((seen, expected), (read, of_text)):
        for call, weights in zip(recorded_calls(reads.model, reads.inputs), own, strict=True):
            torch.testing.assert_close(measure_call(call).weights(), weights[0], atol=1e-5, rtol=1e-4)
    assert {call.stack for call in recorded_calls(read.model, read.inputs)} == {"decoder"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_reads_images_in_its_own_precision(dtype: torch.dtype):
    seen = reading(clip().to(dtype), pixels(40, 30), processor(24, 24), {})
    assert seen.inputs["pixel_values"].dtype == dtype
    for call in recorded_calls(seen.model, seen.inputs):
        weights = measure_call(call).weights()
        torch.testing.assert_close(weights.sum(2), torch.ones(weights.shape[:2]))


VISION, DECODER = {"image_size": 24, "patch_size": 8, **SIZE}, {"vocab_size": 40, **SIZE}


def llava() -> Any:
    vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**DECODER)
    return transformers.LlavaModel(transformers.LlavaConfig(vision_config=vision, text_config=text))


def siglip() -> Any:
    return transformers.SiglipModel(transformers.SiglipConfig(vision_config=VISION, text_config=DECODER))


def idefics3() -> Any:
    text = transformers.LlamaConfig(pad_token_id=0, **DECODER)
    return transformers.Idefics3Model(transformers.Idefics3Config(vision_config=VISION, text_config=text))


def gemma3() -> Any:
    vision, text = (
        transformers.SiglipVisionConfig(**VISION),
        {"head_dim": 16, "num_key_value_heads": 2, **DECODER},
    )
    return transformers.Gemma3Model(transformers.Gemma3Config(vision_config=vision, text_config=text))


@pytest.mark.parametrize("make", [llava, siglip, idefics3, gemma3])
def test_models_of_images_and_texts_are_seen_part_by_part(make: Callable[[], Any]):
    torch.manual_seed(0)
    model = make().eval()
    seen, read = reading(model, pixels(40, 30), processor(24, 24), {}), reading(model, [3, 4, 5, 6], None, {})
    assert seen.picture is not None
    assert len(seen.tokens["encoder"]) == 9 + seen.picture.first
    for part in (seen, read):
        calls = recorded_calls(part.model, part.inputs)
        assert [call.layer for call in calls] == [0, 1]
        for call in calls:
            weights = measure_call(call).weights()
            torch.testing.assert_close(weights.sum(2), torch.ones(weights.shape[:2]))


def test_images_that_a_model_reads_with_a_text_alone_are_refused():
    vilt = transformers.ViltModel(transformers.ViltConfig(image_size=24, patch_size=8, **SIZE))
    with pytest.raises(InputError, match="ViltModel cannot read pixel_values alone: You have to specify"):
        reading(vilt, pixels(24, 24), processor(24, 24), {})


def test_the_share_of_a_sink_is_missing_from_the_keys():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        head_dim=16, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, **DECODER
    )
    model = transformers.GptOssModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([-1.0, 2.0]))
    read = reading(model, [3, 4, 5, 6, 7], None, {})
    with torch.no_grad():
        expected = model(**read.inputs, output_attentions=True).attentions
    for call, weights in zip(recorded_calls(read.model, read.inputs), expected, strict=True):
        site = measure_call(call)
        assert site.lse is not None
        torch.testing.assert_close(site.weights(), weights[0], atol=1e-5, rtol=1e-4)
        (mark,) = call.marks
        torch.testing.assert_close(mark.values[0], 1 - weights[0].sum(2), atol=1e-5, rtol=1e-4)
        # What a page computes of stored queries and keys: exp(score - lse) of the first query's own key.
        score = (call.request.q[0, :, 0] * call.request.k[0, :, 0]).sum(1) * call.request.scale
        torch.testing.assert_close((score - torch.tensor(site.lse[:, 0])).exp(), weights[0, :, 0, 0])


HEIGHT, WIDTH = 28, 40  # 7 x 10 patches, which no windows of 4 x 4 fill, and then 4 x 5


def swin() -> Any:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    config = transformers.SwinConfig(window_size=4, **sizes)  # type: ignore[arg-type]
    model = transformers.SwinModel._from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name or name.endswith("proj.weight"):
            torch.nn.init.normal_(parameter)
    return model


def of_windows(model: Any, values: Tensor) -> list[Tensor]:
    """The weights [windows, H, w w, w w] of every layer, as the model itself computes them."""
    weights: list[Tensor] = []
    handles = [
        part.register_forward_hook(lambda _, arguments, output: weights.append(output[1]))
        for part in model.modules()
        if type(part).__name__ == "SwinAttention"
    ]
    with torch.no_grad():
        model(pixel_values=values)
    for handle in handles:
        handle.remove()
    return weights


def place_of(query: int, size: int, shift: int, grid: tuple[int, int]) -> tuple[int, int]:
    """Window and place within it of a patch: by the equation of Liu et al. 2021, section 3.2."""
    rows, columns = (-(-length // size) * size for length in grid)
    row, column = (query // grid[1] - shift) % rows, (query % grid[1] - shift) % columns
    return row // size * (columns // size) + column // size, row % size * size + column % size


def test_windows_of_swin_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modeling_swin, "torch", Double())
    model = swin().double()
    read = TransformersImages("swin", model, processor(HEIGHT, WIDTH)).of_pixels(pixels(50, 60))
    expected = of_windows(model, read.inputs["pixel_values"])
    assert {stage: len(names) for stage, names in read.tokens.items()} == {"stage 1": 96, "stage 2": 32}
    assert read.tokens["stage 1"][70] == "padding 1"
    assert read.picture is not None
    assert read.picture.patches == {"stage 1": (4, 4), "stage 2": (8, 8)}
    calls = recorded_calls(model, read.inputs)
    assert [(call.stack, call.layer) for call in calls] == [
        ("stage 1", 0),
        ("stage 1", 1),
        ("stage 2", 2),
        ("stage 2", 3),
    ]
    grids = [(7, 10), (7, 10), (4, 5), (4, 5)]
    for call, own, grid, shift in zip(calls, expected, grids, (0, 2, 0, 0), strict=True):
        weights = measure_call(call).weights()
        numbers = call.marks[0].values[0, 0]
        for query in range(grid[0] * grid[1]):
            window, place = place_of(query, 4, shift, grid)
            assert numbers[query] == window
            for key in range(grid[0] * grid[1]):
                other, key_place = place_of(key, 4, shift, grid)
                same = own[window, :, place, key_place] if other == window else torch.zeros(own.shape[1])
                torch.testing.assert_close(weights[:, query, key], same.float(), rtol=0, atol=1e-7)


def test_windows_are_shown_on_the_picture(opened: Callable[..., Page], tmp_path: Path):
    model = swin()
    read = TransformersImages("swin", model, processor(HEIGHT, WIDTH)).of_pixels(pixels(50, 60))
    weights = measure_call(recorded_calls(model, read.inputs)[1]).weights()[1]
    path = tmp_path / "page.html"
    path.write_text(page_of(read), encoding="utf-8")
    tab = opened(path, "view=picture&part=stage 1-self&layer=2&head=2&query=33")
    tab.set_default_timeout(5000)
    assert "patch in row 3, column 3" in tab.locator("output.readout").inner_text()
    script = "rows => rows.map(row => [Number(row.dataset.key), Number(row.dataset.weight)])"
    shown = tab.locator("table.keys tbody tr").evaluate_all(script)
    assert [weight for _, weight in shown] == pytest.approx(
        [float(weights[33, int(key)]) for key, _ in shown], abs=1e-5
    )
    tab.locator("canvas.picture").focus()
    tab.keyboard.press("ArrowDown")
    assert "query=43" in place(tab)
    tab.evaluate("location.hash = 'view=picture&part=stage 2-self&layer=3&query=7'")
    tab.get_by_text("patch in row 1, column 2").wait_for()
    tab.evaluate("location.hash = 'view=matrix&part=stage 1-self&layer=2&head=2&query=33'")
    row = tab.locator("tr[data-mark=window] td").first
    assert int(row.get_attribute("data-value") or -1) == place_of(33, 4, 2, (7, 10))[0]


def test_a_bad_input_says_one_line_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(pixels(40, 60)).save("photo.png")
    Path("bad.png").write_text("hello")
    Path("empty").mkdir()
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=30, **SIZE))
    bert.save_pretrained("bert")
    Path("vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat"]))
    transformers.BertTokenizerFast("vocab.txt").save_pretrained("bert")
    clip().save_pretrained("clip")
    processor(24, 24).save_pretrained("clip")
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    transformers.ResNetModel(resnet).save_pretrained("resnet")
    processor(24, 24).save_pretrained("resnet")
    del bert.bert.encoder.layer[1].attention.self.query
    bert.save_pretrained("partial")
    transformers.BertTokenizerFast("vocab.txt").save_pretrained("partial")
    capfd.readouterr()
    for words, said in [
        (["bert", "a cat", "--target", "a"], "target: only for encoder-decoder models"),
        (["bert", "--row", "1"], "--row: only for image models"),
        (["clip", "bad.png"], "bad.png: not an image"),
        (["clip", "photo.png", "--target", "a"], "--target: only for models of texts"),
        (["resnet", "photo.png"], "ResNetModel does not say how large its patches are"),
        (
            ["partial", "a cat"],
            "2 tensors of BertModel are missing, such as encoder.layer.1.attention.self.query",
        ),
        (["empty", "a cat"], "empty: transformers cannot read it"),
    ]:
        assert main(["explore", *words, "--transformers"]) == 2
        out, errors = capfd.readouterr()
        assert said in errors
        assert (errors.count("\n"), out) == (1, ""), errors
    assert main(["explore", "clip", "photo.png", "--transformers"]) == 0
    assert main(["explore", "bert", "a cat", "--transformers"]) == 0
    assert capfd.readouterr().err == ""


def test_a_model_that_does_not_ask_is_refused():
    with pytest.raises(InputError, match="no layer of Linear dispatches"):
        recorded_calls(torch.nn.Linear(2, 2), {})
