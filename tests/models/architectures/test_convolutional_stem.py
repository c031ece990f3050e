"""Patches by convolutions: their definition and order, refused sizes, files."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer import from_pretrained
from polyformer.core.errors import InputError
from polyformer.models.architectures import VisionConfig, VisionTransformer
from polyformer.models.architectures.vision import ConvolutionalStem
from polyformer.models.checkpoints import save
from polyformer.models.presets import create_model


def stem(channels: int = 3, width: int = 16, patch: int = 4) -> Any:
    torch.manual_seed(0)
    return ConvolutionalStem(channels, width, (patch, patch)).double()


def pixels(height: int = 12, width: int = 8, channels: int = 3) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, channels, height, width, dtype=torch.float64)


def plain(network: Any, x: Tensor) -> Tensor:
    """The tokens by loops over pixels, with zeros around the image."""
    for number, layer in enumerate(network.layers):
        step = 2 if number else 1
        bordered = F.pad(x, (1, 1, 1, 1))
        rows, columns = x.shape[2] // step, x.shape[3] // step
        y = x.new_zeros(len(x), layer.matrix.out_features, rows, columns)
        for i in range(rows):
            for j in range(columns):
                window = bordered[:, :, step * i : step * i + 3, step * j : step * j + 3]
                y[:, :, i, j] = window.flatten(1) @ layer.matrix.weight.T
        mean, variance = y.mean((1, 2, 3), keepdim=True), y.var((1, 2, 3), keepdim=True, unbiased=False)
        x = ((y - mean) / (variance + 1e-5).sqrt()).relu()
    tokens = [x[:, :, i, j] for i in range(x.shape[2]) for j in range(x.shape[3])]
    return torch.stack([token @ network.output.weight.T + network.output.bias for token in tokens], 1)


@pytest.mark.parametrize("patch", [2, 4, 8])
def test_tokens_are_those_of_the_definition(patch: int):
    network, images = stem(patch=patch), pixels(16, 8)
    tokens = network(images)
    assert tokens.shape == (2, (16 // patch) * (8 // patch), 16)
    torch.testing.assert_close(tokens, plain(network, images), rtol=1e-10, atol=1e-10)


def test_pixels_that_fill_no_patch_are_left_out():
    network = stem()
    assert torch.equal(network(pixels(14, 11)), network(pixels(14, 11)[:, :, :12, :8]))


def test_the_tokens_of_an_image_depend_on_no_other():
    network = stem().train()
    torch.testing.assert_close(network(pixels())[:1], network(pixels()[:1]), rtol=1e-12, atol=1e-12)


def test_the_model_reads_them_instead_of_patches(tmp_path: Path):
    network: Any = create_model("vit-mini", convolutional_stem=True, num_hidden_layers=1).eval()
    images = pixels(32, 32).float()
    states = network(images, output_hidden_states=True).hidden_states
    positions = network.get_parameter("encoder.position.tables.0.weight")
    torch.testing.assert_close(states[0][:, 1:], network.patches(images) + positions[1:])
    assert network.grid == (8, 8)
    larger = network(pixels(40, 32).float(), interpolate_pos_encoding=True)
    assert larger.last_hidden_state.shape == (2, 1 + 10 * 8, 96)
    network.save_pretrained(tmp_path)
    copy: Any = from_pretrained(tmp_path)
    assert copy.config.convolutional_stem
    assert torch.equal(copy(images).logits, network(images).logits)


def test_every_weight_of_it_gets_a_gradient():
    network: Any = create_model("vit-mini", convolutional_stem=True, num_hidden_layers=1)
    network(pixels(32, 32).float(), torch.tensor([0, 1])).loss.backward()
    for name, parameter in network.patches.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"patch_size": (3, 3)},
            "convolutional_stem: expected square patches of 2, 4, 8 or 16 pixels, got 3 x 3",
        ),
        ({"patch_size": (4, 2)}, "convolutional_stem: expected square patches .* got 4 x 2"),
        ({"patch_size": (1, 1)}, "convolutional_stem: expected square patches .* got 1 x 1"),
        (
            {"hidden_size": 18},
            "convolutional_stem: expected a hidden_size that 4 divides, got 18",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, Any], message: str):
    (config,) = VisionConfig.examples()
    for name, value in {"convolutional_stem": True, **options}.items():
        config = config.override(name, value)
    with pytest.raises(InputError, match=message):
        VisionTransformer(config)


def test_transformers_has_no_such_model(tmp_path: Path):
    network = create_model("vit-mini", convolutional_stem=True, num_hidden_layers=1)
    with pytest.raises(InputError, match="convolutional_stem"):
        save(network, tmp_path)
