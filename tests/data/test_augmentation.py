"""Random views of images: worked by hand or compared with Pillow, and the same for the same generator."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from polyformer import InputError
from polyformer.data.formats.images import AugmentationConfig, box_view, crop_view, rotation_view, viewed

SIZE = 6, 8


def images(number: int = 1, channels: int = 2) -> Tensor:
    values = np.random.default_rng(0).random((number, channels, *SIZE))
    return torch.from_numpy(values).float()


def through(view: np.ndarray, image: Tensor) -> Tensor:
    return viewed(image, torch.from_numpy(view[:2].astype(np.float32)).unsqueeze(0))


def drawn(seed: int = 0, **options: object) -> np.ndarray:
    return AugmentationConfig(**options).view(SIZE, np.random.default_rng(seed))  # type: ignore[arg-type]


def test_a_mirror_image_swaps_left_and_right():
    torch.testing.assert_close(through(drawn(flip=1.0), images()), images().flip(-1))
    flips = [drawn(seed, flip=0.25)[0, 0] < 0 for seed in range(400)]
    assert 70 < sum(flips) < 130


def test_a_shift_is_a_crop_of_the_image_whose_border_is_repeated():
    padded = torch.nn.functional.pad(images(), (2, 2, 2, 2), mode="replicate")
    crops = {
        (top, left): padded[..., top : top + SIZE[0], left : left + SIZE[1]]
        for top in range(5)
        for left in range(5)
    }
    seen = set()
    for seed in range(200):
        shifted = through(drawn(seed, shift=2), images())
        (place,) = (place for place, crop in crops.items() if torch.allclose(crop, shifted, atol=1e-5))
        seen.add(place)
    assert seen == set(crops), "up to two pixels in each direction, all equally far"


def test_a_rotation_is_pillows():
    grey = torch.arange(48.0).reshape(1, 1, *SIZE)
    turned = np.asarray(Image.fromarray(grey[0, 0].numpy()).rotate(20, Image.Resampling.BILINEAR))
    ours = through(rotation_view(20, SIZE), grey)[0, 0].numpy()
    np.testing.assert_allclose(ours[2:4, 2:6], turned[2:4, 2:6], atol=1e-4)
    quarter = images()[..., :6, :6]
    torch.testing.assert_close(through(rotation_view(90, (6, 6)), quarter), quarter.rot90(1, (-2, -1)))


def test_a_crop_is_scaled_to_the_size_as_by_interpolation():
    crop = images()[..., 1:4, 2:6]
    expected = torch.nn.functional.interpolate(crop, SIZE, mode="bilinear", align_corners=False)
    ours = through(box_view((1, 2, 3, 4), SIZE), images())
    torch.testing.assert_close(ours[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1])


def test_crops_have_at_least_the_stated_share_of_the_area():
    for seed in range(200):
        view = crop_view(0.3, (40, 60), np.random.default_rng(seed))
        wide, high = view[0, 0] * 60, view[1, 1] * 40
        assert wide == pytest.approx(round(wide)), "in whole pixels"
        assert high == pytest.approx(round(high))
        assert 0.28 < wide * high / 2400 <= 1
        assert 0.7 < view[0, 0] / view[1, 1] < 1.4
        assert abs(view[0, 2]) <= 1 - view[0, 0] + 1e-9, "inside the image"
        assert abs(view[1, 2]) <= 1 - view[1, 1] + 1e-9


def test_a_view_follows_from_its_generator():
    options = {"flip": 0.5, "shift": 2, "rotation": 15.0, "crop": 0.5}
    assert np.array_equal(drawn(3, **options), drawn(3, **options))
    assert not np.array_equal(drawn(3, **options), drawn(4, **options))
    assert AugmentationConfig(flip=0.5).changes
    assert not AugmentationConfig().changes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip": 1.5}, r"flip: expected a number from 0 to 1, got 1\.5"),
        ({"shift": -1}, "shift: expected 0 to 1024, got -1"),
        ({"rotation": 200.0}, r"rotation: expected a number from 0 to 180, got 200\.0"),
        ({"crop": 0.0}, r"crop: expected a share in \(0, 1\], got 0\.0"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        AugmentationConfig(**options)  # type: ignore[arg-type]
