"""ViT, DeiT, DINOv2 and BEiT beyond what both compute of images of their size: poolers, other sizes, image
processors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import loaded, predictions, same, shaken
from family_inputs import pixels
from family_table import TABLE, their_config

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.architectures import VisionTransformer
from polyformer.models.checkpoints import FAMILIES, from_transformers
from polyformer.models.presets import create_model

transformers = pytest.importorskip("transformers")

CLASSES = [(name, task) for name in ("vit", "deit", "dinov2", "beit") for task in FAMILIES[name].tasks]
NAMES = ["vit", "deit"]


def their_model(name: str, task: str, *more: Any, **options: Any) -> Any:
    kind = getattr(transformers, FAMILIES[name].class_prefix + task)
    return shaken(kind(their_config(name, task, num_labels=4, **options), *more))


@pytest.mark.parametrize(("name", "task"), CLASSES)
def test_hidden_states(name: str, task: str):
    """Of every layer; theirs keep the last before its norm."""
    for config in TABLE[name].configs:
        theirs = their_model(name, task, **config)
        ours, images = from_transformers(theirs), pixels(theirs)
        assert isinstance(ours, VisionTransformer)
        mine, other = (model(images, output_hidden_states=True) for model in (ours, theirs))
        same(mine.logits, predictions(other)[0])
        for a, b in zip(mine.hidden_states[:-1], other.hidden_states[:-1], strict=True):
            same(a, b)
        if task == "Model":
            same(mine.last_hidden_state, other.last_hidden_state)


def test_attention_weights():
    """Theirs are rounded to float32."""
    theirs = their_model("deit", "Model", **TABLE["deit"].configs[0], attn_implementation="eager")
    models, images = (from_transformers(theirs), theirs), pixels(theirs)
    mine, other = (model(images, output_attentions=True).attentions for model in models)
    for a, b in zip(mine, other, strict=True):
        same(a, b, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_a_pooler(name: str, tmp_path: Path):
    theirs = their_model(name, "Model", False)
    ours, images, kind = loaded(theirs, tmp_path), pixels(theirs), type(theirs)
    hidden = theirs(images).last_hidden_state
    same(ours(images).last_hidden_state, hidden)
    same(ours(images).logits, hidden[:, 0])
    ours.save_pretrained(tmp_path / "hub", format="hub")
    again = kind.from_pretrained(tmp_path / "hub", add_pooling_layer=False, dtype=torch.float64)
    same(again(images).last_hidden_state, hidden)
    assert polyformer.from_pretrained(tmp_path / "hub").config == ours.config


@pytest.mark.parametrize("name", NAMES)
def test_interpolated_positions(name: str, tmp_path: Path):
    theirs = their_model(name, "ForImageClassification")
    ours = loaded(theirs, tmp_path)
    for height, width in ((16, 12), (8, 8), (6, 4), (4, 20)):
        images = pixels(theirs, 2, height, width)
        same(
            ours(images, interpolate_pos_encoding=True).logits,
            theirs(images, interpolate_pos_encoding=True).logits,
        )


def test_dinov2_interpolates_positions(tmp_path: Path):
    """Theirs without being asked, and in float32."""
    theirs = their_model("dinov2", "ForImageClassification")
    ours = loaded(theirs, tmp_path)
    for height, width in ((16, 12), (4, 20)):
        images = pixels(theirs, 2, height, width)
        same(ours(images, interpolate_pos_encoding=True).logits, theirs(images).logits, 1e-5)


def test_a_beit_has_tables_for_its_own_images_alone(tmp_path: Path):
    theirs = their_model("beit", "ForImageClassification", use_relative_position_bias=True)
    ours = loaded(theirs, tmp_path)
    with pytest.raises(InputError, match="positions 'grid_bias' cannot be interpolated"):
        ours(pixels(theirs, 2, 16, 12), interpolate_pos_encoding=True)


def test_rows_skip_more_in_upper_layers_of_a_beit(tmp_path: Path):
    theirs = their_model("beit", "Model", num_hidden_layers=4, drop_path_rate=0.3)
    ours = loaded(theirs, tmp_path)
    rates = [ours.config.encoder.block.for_layer(layer).drop_path for layer in range(4)]
    assert [pytest.approx(layer.drop_path.drop_prob) for layer in theirs.layers[1:]] == [
        rate for (rate,) in rates[1:]
    ]
    assert rates[0] == (0.0,)


def test_the_image_processor_is_read_and_written(tmp_path: Path):
    their_model("vit", "ForImageClassification", image_size=[6, 10]).save_pretrained(tmp_path / "theirs")
    numbers: dict[str, Any] = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    size = {"height": 6, "width": 10}
    transformers.ViTImageProcessor(size=size, **numbers).save_pretrained(tmp_path / "theirs")
    ours: Any = polyformer.from_pretrained(tmp_path / "theirs")
    assert (ours.config.mean, ours.config.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    ours.save_pretrained(tmp_path / "hub", format="hub")
    processor: Any = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hub")
    picture = torch.randint(256, (6, 10, 3), dtype=torch.uint8)
    theirs_of_it = processor(picture.numpy(), return_tensors="pt")["pixel_values"]
    same(ours.normalize(picture[None]), theirs_of_it, 1e-6)
    assert polyformer.from_pretrained(tmp_path / "hub").config == ours.config


@pytest.mark.parametrize("preset", ["vit-mini", "deit-tiny-patch16-224"])
def test_presets_are_read_by_transformers(preset: str, tmp_path: Path):
    ours: Any = create_model(preset, num_hidden_layers=1, num_labels=3).eval()
    ours.save_pretrained(tmp_path, format="hub")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    images = torch.randn(1, 3, *ours.config.image_size)
    with torch.no_grad():
        same(ours(images).logits, theirs(images).logits, 1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_token": False, "pooling": "mean"}, "class_token: False instead of True"),
        ({"registers": 2}, "registers: 2 instead of 0"),
        ({"attention": "Window(2)"}, "encoder.attention.mechanism.pattern"),
        ({"position": "rope"}, "encoder.position"),
    ],
)
def test_what_no_vit_has_is_refused(options: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(InputError, match=message):
        create_model("vit-mini", **options).save_pretrained(tmp_path, format="hub")


@pytest.mark.parametrize("name", NAMES)
def test_masked_images_are_refused_by_name(name: str, tmp_path: Path):
    task = "ForMaskedImageModeling"
    theirs = getattr(transformers, FAMILIES[name].class_prefix + task)
    theirs(theirs.config_class(**TABLE[name].sizes, encoder_stride=2)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"architecture of '{name}' '{theirs.__name__}'"):
        polyformer.from_pretrained(tmp_path)


def test_a_new_head_on_a_model_without_one(tmp_path: Path):
    theirs = their_model("vit", "Model")
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="newly initialized: head.output"):
        ours: Any = polyformer.from_pretrained(tmp_path, head="classify(num_labels=7, hidden=False)")
    assert ours(pixels(theirs)).logits.shape == (2, 7)
