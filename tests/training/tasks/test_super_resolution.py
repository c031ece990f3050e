"""Super-resolution: what is predicted from what, what is refused, and what is scored and shown."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyformer import InputError
from polyformer.data import TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes.guessed import guessed_recipe
from polyformer.training.tasks import SuperResolution, SuperResolutionConfig
from polyformer.training.tasks.image import psnr

SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "decoder.position": {"kind": "grid", "shape": [4, 2, 3]},
    "decoder.attention": "Local2D(shape=[4, 2, 3], query=[2, 2], memory=[1, 1, 1])",
}


def images(number: int) -> list[dict[str, Any]]:
    pixels = np.random.default_rng(0).integers(0, 256, (number, 24)).astype(np.uint8)
    return [{"image": image.tobytes(), "height": 4, "width": 2} for image in pixels]


def build(factor: int = 2, small: tuple[int, ...] = (2, 1, 3)) -> tuple[SuperResolution, Transformer]:
    """Return the task and a model of colour images of 4 x 2 pixels, 5 levels for each colour."""
    config = SuperResolutionConfig(levels=5, factor=factor, batch_tokens=64).resolve(images(1))
    task = config.build(config.tokenizer(TokenizerConfig(), images(1)))
    torch.manual_seed(0)
    preset = "image-transformer-super-resolution-small"
    options = {**SMALL, "encoder.position": {"kind": "grid", "shape": small}}
    return task, Transformer(task.adapt(model_config(preset, options))).double().eval()


def test_the_input_is_the_mean_over_squares():
    task, _ = build()
    (row,) = task.rows.prepare(images(1))
    pixels = np.frombuffer(images(1)[0]["image"], np.uint8).reshape(4, 2, 3).astype(float)
    means = np.stack([pixels[:2].mean((0, 1)), pixels[2:].mean((0, 1))]).round()
    assert row["input_ids"].tolist() == (means.flatten() * 5 // 256).astype(int).tolist()
    assert row["labels"].tolist() == [byte * 5 // 256 for byte in images(1)[0]["image"]]


def test_every_pixel_is_measured_from_the_small_image_and_the_pixels_before():
    task, model = build()
    held = task.rows.held_out(images(3))
    total = sum(task.metrics.totals(model, batch) for _, batch in held.batches.epoch(0))
    assert isinstance(total, torch.Tensor)
    nats = 0.0
    for row in task.rows.prepare(images(3)):
        small, levels = torch.tensor(row["input_ids"])[None], row["labels"].tolist()
        for place, level in enumerate(levels):
            read = torch.tensor([[task.rows.start, *levels[:place]]])
            logits = model(small, decoder_input_ids=read).logits[0, -1]
            nats -= logits.log_softmax(-1)[level].item()
    torch.testing.assert_close(total, torch.tensor([nats, 3 * 24], dtype=torch.float64), rtol=1e-10, atol=0)
    assert task.metrics.values(total.tolist(), {})["bits_per_dim"] == pytest.approx(nats / 72 / math.log(2))


def test_images_are_scored_and_shown():
    task, model = build()
    assert task.pictures == ("real", "small", "generated")
    real, small, generated = task.complete(model, images(3), 2, seed=1)
    assert real.shape == small.shape == generated.shape == (2, 4, 2, 3)
    assert torch.equal(small[:, 0, 0], small[:, 1, 1])
    assert torch.equal(generated, task.complete(model, images(3), 2, seed=1)[2])
    scores = task.score(model, images(3))
    assert scores.keys() == {"loss", "bits_per_dim", "psnr", "psnr_repeated"}
    assert scores["psnr_repeated"] > scores["psnr"]  # of a model that has learned nothing


def test_the_ratio_of_signal_and_noise():
    real = torch.zeros(2, 3, 3, dtype=torch.float64)
    assert psnr(torch.full_like(real, 0.1), real) == pytest.approx(20)
    assert psnr(real, real) == pytest.approx(20 * math.log10(510))


def test_a_recipe_fits_the_images_of_a_folder(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    for number in range(3):
        image.fromarray(np.full((8, 12, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    for name, factor in (("super-resolution", 2), (None, 4)):
        options = {"task.kind": "super_resolution", "task.factor": factor}
        recipe, _ = guessed_recipe(str(tmp_path), name, options)
        model = recipe["model"]
        assert model["encoder"]["position"]["shape"] == [8 // factor, 12 // factor, 3]
        assert model["decoder"]["position"]["shape"] == [8, 12, 3]
        assert model["decoder"]["attention"].startswith("Local2D(shape=[8, 12, 3]")


def test_factors_shapes_and_stacks_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="factor: expected a divisor of the height 4 and the width 2, got 3"):
        build(factor=3)
    with pytest.raises(InputError, match="made for images of 4 x 2 x 3, and the data's are 2 x 1 x 3"):
        build(small=(4, 2, 3))
    task, _ = build()
    with pytest.raises(InputError, match="this task needs an encoder-decoder model, got one with a decoder"):
        task.adapt(model_config("decoder-tiny"))
