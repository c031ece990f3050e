"""Image classification: what is counted, what is refused, and a model that learns."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from polyformer import InputError
from polyformer.data import Splits
from polyformer.data.formats.images import AugmentationConfig
from polyformer.models.architectures import VisionTransformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import ImageClassification, ImageClassificationConfig, TaskWithData
from polyformer.training.tasks.classify_image import statistics

SIZE = 8, 12
SMALL = {
    "patch_size": [4, 4],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def rows(number: int = 24, channels: int = 1, seed: int = 0) -> list[dict[str, object]]:
    """Noise that is brighter at the left or at the right, as the label says."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 100, (number, *SIZE, channels)).astype(np.uint8)
    labels = ["left" if i % 3 else "right" for i in range(number)]
    for image, label in zip(images, labels):
        image[:, : SIZE[1] // 2] += np.uint8(100 * (label == "left"))
        image[:, SIZE[1] // 2 :] += np.uint8(100 * (label == "right"))
    return [
        {"image": image.tobytes(), "height": SIZE[0], "width": SIZE[1], "label": label}
        for image, label in zip(images, labels)
    ]


def build(channels: int = 1, **options: object) -> tuple[ImageClassification, VisionTransformer]:
    config = ImageClassificationConfig(batch_size=8, **options)  # type: ignore[arg-type]
    task = config.resolve(rows(channels=channels)).build()
    torch.manual_seed(0)
    return task, VisionTransformer(task.adapt(model_config("vit-mini", SMALL)))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_model_gets_size_labels_and_the_statistics_of_the_images(channels: int):
    task, model = build(channels)
    config = model.config
    assert (config.image_size, config.num_channels) == (SIZE, channels)
    assert task.labels == ("left", "right")
    pixels = np.stack([np.frombuffer(row["image"], np.uint8) for row in rows(channels=channels)])  # type: ignore[call-overload]
    pixels = pixels.reshape(-1, channels) / 255
    np.testing.assert_allclose(config.mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(config.std, pixels.std(0), rtol=1e-12)
    (_, batch) = next(task.rows.held_out(rows(3, channels)).batches.epoch(0))
    images = torch.from_numpy(np.stack([task.config.pixels(row) for row in rows(3, channels)]))
    torch.testing.assert_close(batch["pixel_values"], model.normalize(images))
    assert batch["labels"].tolist() == [1, 0, 0]


def test_images_of_one_level_have_a_deviation():
    assert statistics([np.full((2, 2, 1), 51, np.uint8)]) == ((0.2,), (1.0,))


def test_a_model_learns_and_says_its_labels():
    task, model = build(augmentation=AugmentationConfig(shift=1))
    fitting = TaskWithData(task, Splits(rows(), rows(12, seed=1), None), seed=0)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = itertools.chain.from_iterable(fitting.batches(epoch, 0, 0, 1) for epoch in itertools.count())
    for batch in itertools.islice(batches, 60):
        optimizer.zero_grad()
        fitting.loss(model, batch).backward()
        optimizer.step()
    held = rows(12, seed=1)
    scores = task.score(model.eval(), held)
    assert scores["accuracy"] == scores["f1_macro"] == 1
    assert scores["majority"] == pytest.approx(8 / 12)
    shares = task.classify(model, [{**row, "label": None} for row in held])
    assert [max(share, key=lambda name: share[name]) for share in shares] == [row["label"] for row in held]
    assert all(sum(share.values()) == pytest.approx(1) for share in shares)


def test_views_are_random_in_training_alone_and_resume_bit_for_bit():
    task, _ = build(augmentation=AugmentationConfig(flip=0.5, shift=2, rotation=10.0))
    fitting = TaskWithData(task, Splits(rows(), rows(), None), seed=3)  # type: ignore[arg-type]
    whole = list(fitting.batches(5, 0, 0, 1))
    resumed = list(TaskWithData(task, Splits(rows(), None, None), seed=3).batches(5, 2, 0, 1))  # type: ignore[arg-type]
    assert torch.equal(whole[2]["pixel_values"], resumed[0]["pixel_values"])
    plain, _ = build()
    held = [next(task.rows.held_out(rows()).batches.epoch(0))[1] for task in (task, plain)]
    assert torch.equal(held[0]["pixel_values"], held[1]["pixel_values"])
    first = {id(row["image"]): row for row in fitting.train.rows}  # type: ignore[union-attr]
    assert len(first) == 24
    assert not torch.equal(whole[0]["pixel_values"], next(fitting.batches(6, 0, 0, 1))["pixel_values"])


def test_images_of_other_labels_sizes_and_models_are_refused():
    task, _ = build()
    with pytest.raises(InputError, match="label: 'up'"):
        task.rows.held_out([{**rows(1)[0], "label": "up"}])
    with pytest.raises(
        InputError, match=r"expected 8 x 12 x 1 pixels, .* got 8 x 12 x 3; .*data\.image_mode"
    ):
        task.rows.held_out(rows(1, channels=3))
    with pytest.raises(InputError, match="this task needs a model of images, such as the preset vit-mini"):
        task.adapt(model_config("encoder-tiny"))


def test_statistics_that_are_stated_stay():
    config = ImageClassificationConfig(mean=(0.5,), std=(0.25,)).resolve(rows())
    assert (config.mean, config.std) == ((0.5,), (0.25,))
    assert dataclasses.replace(config, labels=("a", "b")).resolve(rows()).labels == ("a", "b")
