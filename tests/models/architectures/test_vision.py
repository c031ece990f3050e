"""The Vision Transformer: patches, other parts by name, files, what is refused, and that it learns."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer import from_pretrained
from polyformer.attention.patterns import Local2D, Window
from polyformer.attention.positions import PositionConfig
from polyformer.core.errors import InputError
from polyformer.models.architectures import VisionConfig, VisionTransformer, build_model, decode_config
from polyformer.models.architectures.model_card import write_export_card
from polyformer.models.architectures.vision import patches
from polyformer.models.architectures.weights import with_weights
from polyformer.models.presets import create_model


def config(**options: Any) -> VisionConfig:
    """Images of 12 x 8 in one channel, 3 x 2 patches."""
    (result,) = VisionConfig.examples()
    for name, value in options.items():
        result = result.override(name, value)
    return result


def model(**options: Any) -> Any:
    """In double precision, with weights that are large enough to matter."""
    torch.manual_seed(0)
    return VisionTransformer(config(initializer_range=0.3, **options)).double().eval()


def images(rows: int = 2, height: int = 12, width: int = 8, channels: int = 1) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, channels, height, width, dtype=torch.float64)


@pytest.mark.parametrize(("height", "width"), [(12, 15), (14, 17), (3, 5)])
def test_patches_are_a_convolution(height: int, width: int):
    """The sum over c, y, x of W[e, c, y, x] image[c, 3 i + y, 5 j + x], plainly and by torch."""
    pixels, weight = images(2, height, width, 3), torch.randn(7, 3, 3, 5, dtype=torch.float64)
    windows = pixels.unfold(2, 3, 3).unfold(3, 5, 5)
    plain = torch.einsum("bcijyx,ecyx->bije", windows, weight).flatten(1, 2)
    by_torch = F.conv2d(pixels, weight, stride=(3, 5)).flatten(2).mT
    actual = patches(pixels, (3, 5)) @ weight.flatten(1).T
    torch.testing.assert_close(actual, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual, by_torch, rtol=1e-12, atol=1e-12)


def test_the_first_token_is_classified_after_the_final_norm():
    network, pixels = model(), images()
    output = network(pixels, torch.tensor([1, 4]), output_attentions=True, output_hidden_states=True)
    x = network.patches(patches(pixels, (4, 4)))
    assert network.class_token is not None
    x = torch.cat([network.class_token.weight.expand(2, 1, -1), x], 1)
    x = x + network.get_parameter("encoder.position.tables.0.weight")
    assert output.hidden_states is not None
    torch.testing.assert_close(output.hidden_states[0], x, rtol=1e-12, atol=1e-12)
    logits = network.head.output(output.last_hidden_state[:, 0])
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss, F.cross_entropy(logits, torch.tensor([1, 4])))
    assert output.attentions is not None
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 2, 7, 7)] * 2
    assert network(pixels).attentions is None
    assert network.grid == (3, 2)


@pytest.mark.parametrize("options", [{}, {"class_token": False}, {"registers": 2}])
def test_the_mean_is_of_the_patches(options: dict[str, Any]):
    network = model(pooling="mean", **options)
    output = network(images())
    mean = output.last_hidden_state[:, -6:].mean(1)
    torch.testing.assert_close(output.logits, network.head.output(mean))


def test_registers_follow_the_class_token():
    network = model(registers=2, distillation_token=True)
    output = network(images(), output_hidden_states=True)
    assert output.hidden_states is not None
    tokens = [network.class_token, network.distillation_token, network.registers]
    before = torch.cat([token.weight for token in tokens if token is not None])
    positions = network.get_parameter("encoder.position.tables.0.weight")
    torch.testing.assert_close(output.hidden_states[0][:, :4], (before + positions[:4]).expand(2, -1, -1))


def test_bytes_are_normalized_channel_by_channel():
    network = model(num_channels=3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    pixels = torch.randint(256, (2, 12, 8, 3), dtype=torch.uint8)
    expected = (pixels[:, 4, 5, 1].float() / 255 - 0.2) / 0.25
    torch.testing.assert_close(network.normalize(pixels)[:, 1, 4, 5], expected)
    assert network(network.normalize(pixels)).logits.dtype == torch.float64
    with pytest.raises(
        InputError, match=r"images: expected uint8 \[batch, height, width, 3\], got torch.float"
    ):
        network.normalize(pixels.float())


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_local_attention_is_that_of_the_grid(tokens: int):
    """Which pixels may change the output of each patch: a plain loop over rows and columns of patches."""
    options = {"class_token": tokens > 0, "registers": max(tokens - 1, 0), "pooling": "mean"}
    pattern = Local2D((4, 3), (2, 1), (1, 1, 0))
    network = model(image_size=(8, 6), patch_size=(2, 2), attention=pattern, num_hidden_layers=1, **options)
    pixels = images(1, 8, 6).requires_grad_()
    hidden = network(pixels).last_hidden_state[0, :, 0]
    for row in range(4):
        for column in range(3):
            (gradient,) = torch.autograd.grad(hidden[tokens + 3 * row + column], pixels, retain_graph=True)
            moved = patches(gradient.abs(), (2, 2))[0].sum(-1).view(4, 3) > 0
            for i in range(4):
                for j in range(3):
                    top = row // 2 * 2
                    seen = top - 1 <= i < top + 2 and column - 1 <= j <= column
                    assert moved[i, j] == seen, (row, column, i, j)
    if tokens:
        (gradient,) = torch.autograd.grad(hidden[0], pixels)
        assert (patches(gradient.abs(), (2, 2)).sum(-1) > 0).all()


@pytest.mark.parametrize(
    "attention",
    [
        Window(2),
        "linformer(max_length=7, k=3)",
        "lsh(buckets=2, window=4)",
        "performer",
        "sinkhorn(block_size=3)",
    ],
)
def test_attention_is_exchanged_by_name(attention: Any):
    network = build_model(config(attention=attention))
    loss = network(images().float(), torch.tensor([0, 1])).loss
    loss.backward()
    assert loss.isfinite()


def test_every_position_scheme_fits():
    for kind in PositionConfig.kinds:
        position: Any = PositionConfig.kinds[kind].examples()[0]
        network = model(position={"kind": kind, "shape": [3, 2]} if "grid" in kind else position)
        assert network(images()).logits.isfinite().all(), kind


def test_experts_and_other_losses_are_added_in_training():
    network = model(feedforward="experts").train()
    output = network(images(), torch.tensor([0, 1]))
    assert output.losses is not None
    assert len(output.losses) > 1
    torch.testing.assert_close(output.loss, sum(output.losses.values()))
    evaluated = network.eval()(images(), torch.tensor([0, 1]))
    torch.testing.assert_close(evaluated.loss, evaluated.losses["prediction"])


def test_larger_images_are_read_with_interpolated_positions():
    network = model()
    with pytest.raises(
        InputError, match=r"takes images of 12 x 8 pixels, got 16 x 20; .*interpolate_pos_encod"
    ):
        network(images(2, 16, 20))
    output = network(images(2, 16, 20), interpolate_pos_encoding=True)
    assert output.last_hidden_state.shape == (2, 1 + 4 * 5, 16)
    same = network(images(), interpolate_pos_encoding=True)
    assert torch.equal(same.logits, network(images()).logits)
    assert model(position="rope")(images(2, 16, 20), interpolate_pos_encoding=True).logits.isfinite().all()
    with pytest.raises(
        InputError, match="positions 'grid' cannot be interpolated; resize the images to 12 x 8"
    ):
        model(position={"kind": "grid", "shape": [3, 2]})(images(2, 16, 20), interpolate_pos_encoding=True)
    with pytest.raises(InputError, match="pixel_values: 3 x 20 pixels are less than a patch"):
        network(images(2, 3, 20), interpolate_pos_encoding=True)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (
            images(channels=3),
            r"pixel_values: expected \[batch, 1, height, width\] \(1 channels\), got \[2, 3, 12",
        ),
        (images()[0], r"pixel_values: expected \[batch, 1, height, width\]"),
        (
            images().long(),
            "pixel_values: expected normalized floating-point numbers, got torch.int64; `normalize`",
        ),
    ],
)
def test_wrong_images_are_refused(pixels: Tensor, message: str):
    with pytest.raises(InputError, match=message):
        model()(pixels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch_size": (16, 4)}, "image_size: 12 x 8 pixels are less than a patch of 16 x 4"),
        (
            {"class_token": False},
            "head.pooling: 'first' reads the class token, and there is none; use 'mean'",
        ),
        (
            {"class_token": False, "distillation_token": True, "pooling": "mean"},
            "distillation_token: it follows a class token",
        ),
        ({"mean": (0.1, 0.2)}, "mean: expected 1 number, or one for each of the 1 channels"),
        ({"std": (0.0,)}, r"std\[0\]: expected a number above 0"),
        ({"head": "tag"}, "head: expected one that pools, such as 'classify', got 'tag'"),
        ({"head": "distilled"}, "head: 'distilled' reads a distillation token"),
        ({"patch_size": (0, 4)}, r"patch_size\[0\]: expected 1 or more, got 0"),
        ({"attention": Local2D((2, 3), (1, 1), (0, 0, 0))}, r"Local2D: .*use shape=\[3, 2\]"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        model(**options)(images())


@pytest.mark.parametrize(
    "options", [{"registers": 2}, {"distillation_token": True, "head": "distilled(num_labels=3)"}]
)
def test_saved_and_loaded_it_is_the_same(options: dict[str, Any], tmp_path: Path):
    network = model(**options)
    network.save_pretrained(tmp_path)
    copy: Any = from_pretrained(tmp_path)
    assert isinstance(copy, VisionTransformer)
    assert decode_config(network.config.to_dict()) == network.config
    assert torch.equal(copy(images()).logits, network(images()).logits)


def test_what_is_saved_has_a_card(tmp_path: Path):
    network = model()
    network.save_pretrained(tmp_path)
    write_export_card(network, tmp_path, "polyformer")
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: image-classification" in card
    assert "- images of 12 x 8 pixels" in card
    assert "languages" not in card


def test_it_is_not_wrapped_for_transformers_and_has_no_int8():
    hub = pytest.importorskip("polyformer.models.transformers")
    with pytest.raises(InputError, match="wrap: transformers has no class for a VisionTransformer"):
        hub.wrap(model())
    with pytest.raises(InputError, match="weights: a VisionTransformer does not support int8"):
        with_weights(model(), "int8")


def test_it_learns_where_a_bright_square_is():
    torch.manual_seed(0)
    network: Any = create_model(
        "vit-mini", image_size=(8, 8), num_channels=1, num_hidden_layers=2, num_labels=4, hidden_size=48
    )
    optimizer = torch.optim.Adam(network.train().parameters(), 2e-3)
    for _ in range(80):
        labels = torch.randint(4, (32,))
        pixels = 0.2 * torch.randn(32, 1, 2, 4, 2, 4)
        pixels[torch.arange(32), 0, labels // 2, :, labels % 2] += 1
        loss = network(pixels.view(32, 1, 8, 8), labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
