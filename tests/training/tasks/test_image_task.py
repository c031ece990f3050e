"""Image modelling: what is counted, what is refused, and what a run leaves."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fitted import learned

from polyformer import InputError
from polyformer.cli.main import main
from polyformer.data import Splits, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes.report import baselines, write_sheet
from polyformer.training.tasks import ImageConfig, ImageModelling

SHAPE = 4, 3
SMALL = {
    "hidden_size": 16,
    "position": {"kind": "grid", "shape": [4, 3]},
    "pattern": "Local2D(shape=[4, 3], query=[2, 2], memory=[1, 1, 1])",
}


def images(number: int, seed: int = 0) -> list[dict[str, object]]:
    pixels = np.random.default_rng(seed).integers(0, 256, (number, 12)).astype(np.uint8)
    return [{"image": image.tobytes(), "height": 4, "width": 3} for image in pixels]


def build(levels: int = 5, **options: object) -> tuple[ImageModelling, Transformer]:
    rows = images(3)
    config = dataclasses.replace(ImageConfig(levels=levels, batch_tokens=26), **options).resolve(rows)
    task = config.build(config.tokenizer(TokenizerConfig(), rows))
    torch.manual_seed(0)
    return task, Transformer(task.adapt(model_config("decoder-tiny", SMALL))).double().eval()


def test_a_model_of_even_chances_costs_the_logarithm_of_its_tokens():
    """The start token is one of them until training takes its chance away."""
    task, model = build(levels=7)
    with torch.no_grad():
        model.tokens.weight.zero_()
    metrics = task.score(model, images(5))
    assert metrics["bits_per_dim"] == pytest.approx(math.log2(7 + 1), rel=1e-12)
    assert metrics["loss"] == pytest.approx(math.log(7 + 1), rel=1e-12)


def test_every_pixel_is_measured_once_from_those_before_it():
    task, model = build()
    rows = images(5)
    held = task.rows.held_out(rows)
    total = sum(task.metrics.totals(model, batch) for _, batch in held.batches.epoch(0))
    assert isinstance(total, torch.Tensor)
    nats = 0.0
    for row in rows:
        levels = [byte * 5 // 256 for byte in row["image"]]  # type: ignore[attr-defined]
        ids = [5, *levels]
        for place in range(12):
            logits = model(torch.tensor([ids[: place + 1]])).logits[0, -1]
            nats -= logits.log_softmax(-1)[levels[place]].item()
    torch.testing.assert_close(total, torch.tensor([nats, 5 * 12], dtype=torch.float64), rtol=1e-10, atol=0)


def test_the_model_gets_levels_and_positions():
    _, model = build()
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings) == (6, 13)
    assert (config.special.bos, config.special.eos, config.special.pad) == (5, None, None)


def test_images_are_completed_below_their_upper_half():
    task, model = build()
    real, half, completed = task.complete(model, images(4), 3, seed=1)
    assert real.shape == half.shape == completed.shape == (3, 4, 3)
    assert torch.equal(real[0].flatten(), torch.tensor([byte * 5 // 256 for byte in images(1)[0]["image"]]))  # type: ignore[attr-defined]
    assert torch.equal(half[:, :2], real[:, :2])
    assert torch.equal(completed[:, :2], real[:, :2])
    assert (half[:, 2:] == -1).all()
    assert completed.min() >= 0
    assert completed.max() < 5
    assert torch.equal(task.complete(model, images(4), 3, seed=1)[2], completed)
    assert not torch.equal(task.complete(model, images(4), 3, seed=2)[2], completed)


def test_baselines_are_even_chances_and_the_counts_of_each_pixel():
    task, _ = build(levels=2)
    dark, light = ({"image": bytes([grey] * 12), "height": 4, "width": 3} for grey in (0, 255))
    splits = Splits([dark, dark, light], [light], None)  # type: ignore[arg-type]
    even, counted = (metrics["bits_per_dim"] for _, metrics in baselines(task, splits))
    assert even == pytest.approx(1)
    assert counted == pytest.approx(-math.log2(2 / 5))


def test_a_sheet_is_drawn(tmp_path: Path):
    task, model = build()
    write_sheet(tmp_path / "images.png", task, model, Splits(images(3), None, None), seed=0)  # type: ignore[arg-type]
    assert (tmp_path / "images.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "part",
    [
        {"position": {"kind": "grid", "shape": [3, 4]}},
        {"pattern": "Window(1) | Local2D(shape=[3, 4], query=[2, 2], memory=[1, 1, 1])"},
        {"pattern": "PerHead([Window(1), Local2D(shape=[3, 4], query=[2, 2], memory=[1, 1, 1])])"},
    ],
)
def test_a_model_for_another_shape_is_refused(part: dict[str, object]):
    task, _ = build()
    with pytest.raises(InputError, match="model: it is made for images of 3 x 4, and the data's are 4 x 3"):
        task.adapt(model_config("decoder-tiny", {**SMALL, **part}))


def test_colours_are_three_tokens_a_pixel_and_are_learned():
    """One colour a row of pixels: a model that knows rows, columns and channels guesses all but the first."""
    generator = np.random.default_rng(0)
    rows = [
        {
            "image": np.repeat(generator.choice([0, 255], (2, 1, 3)), 3, axis=1).astype(np.uint8).tobytes(),
            "height": 2,
            "width": 3,
        }
        for _ in range(64)
    ]
    config = ImageConfig(levels=2, batch_tokens=19 * 64).resolve(rows)
    assert config.channels == 3
    task = config.build(config.tokenizer(TokenizerConfig(), rows))
    part = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "position": {"kind": "grid", "shape": [2, 3, 3]},
        "pattern": "Local2D(shape=[2, 3, 3], query=[1, 3], memory=[1, 2, 2])",
    }
    with pytest.raises(InputError, match="made for images of 2 x 3, and the data's are 2 x 3 x 3"):
        task.adapt(model_config("decoder-tiny", {**part, "position": {"kind": "grid", "shape": [2, 3]}}))
    before, after = learned(task, model_config("decoder-tiny", part), rows, steps=300, lr=5e-3)
    assert before["bits_per_dim"] > 0.9
    assert after["bits_per_dim"] < 0.4, "6 of the 18 bits of a picture are chance, the others copies of them"


def test_a_completed_colour_image_keeps_its_shape(tmp_path: Path):
    rows = [{"image": bytes(range(4 * 3 * 3)), "height": 4, "width": 3}] * 2
    config = ImageConfig(levels=4, batch_tokens=37).resolve(rows)
    task = config.build(config.tokenizer(TokenizerConfig(), rows))
    model = Transformer(task.adapt(model_config("decoder-tiny", {"hidden_size": 16}))).eval()
    real, half, completed = task.complete(model, rows, 2, seed=0)
    assert real.shape == completed.shape == (2, 4, 3, 3)
    assert torch.equal(completed[:, :2], real[:, :2])
    assert (half[:, 2:] == -1).all()
    write_sheet(tmp_path / "a.png", task, model, Splits(rows, None, None), seed=0)  # type: ignore[arg-type]


def test_images_of_another_size_are_refused():
    task, _ = build()
    with pytest.raises(InputError, match="image: "):
        task.rows.prepare([{"image": bytes(11), "height": 4, "width": 3}])


def test_options_are_checked():
    with pytest.raises(
        InputError, match="batch_tokens: expected a token more than an image has pixels, 13, or"
    ):
        build(batch_tokens=12)


def test_a_run_trains_measures_and_says_that_it_writes_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = str(tmp_path / "run")
    tiny = [
        "--steps",
        "2",
        "--device",
        "cpu",
        "--model.hidden_size",
        "16",
        "--model.num_attention_heads",
        "2",
    ]
    assert main(["train", "image", "--out", out, *tiny]) == 0
    said = capsys.readouterr().out
    assert "uniform" in said
    assert "bits per dim" in said
    assert (tmp_path / "run" / "images.png").is_file()
    assert main(["evaluate", out, "--device", "cpu"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1].split()
        == said.split("this model, ")[2].splitlines()[0].split()
    )
    assert main(["generate", out]) == 2
    assert "a run of the task 'image', which cannot do this" in capsys.readouterr().err
