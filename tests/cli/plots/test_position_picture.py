"""Pictures of position schemes against their equations."""

import math
from pathlib import Path

import pytest
import torch

from polyformer.attention.positions import (
    AlibiConfig,
    NoPositionConfig,
    PositionConfig,
    SinusoidalConfig,
    T5BiasConfig,
    sinusoids,
)
from polyformer.cli.plots.position import WIDTH, draw_position, position_picture
from polyformer.cli.plots.show_pictures import ASCII, position_text
from polyformer.core.errors import InputError


def test_alibi_is_its_bias():
    picture = position_picture(AlibiConfig(), 9, heads=4)
    distance = (torch.arange(9).view(-1, 1) - torch.arange(9)).abs()
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    assert picture.scores is not None
    assert torch.equal(picture.scores, -slopes.view(-1, 1, 1) * distance)
    assert picture.vectors is None
    assert not picture.learned
    assert picture.by_distance is not None
    assert torch.equal(picture.by_distance, -slopes.view(-1, 1) * torch.arange(-8, 9).abs())
    assert list(picture.groups) == ["head 0", "head 1", "head 2", "head 3"]


def test_rope_is_the_mean_of_its_cosines():
    picture = position_picture(PositionConfig.from_dict({"kind": "rope", "base": 100.0}, "position"), 12)
    theta = 100.0 ** -(torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    distance = (torch.arange(12).view(-1, 1) - torch.arange(12)).double()
    expected = math.sqrt(WIDTH) * ((distance[..., None] * theta).cos().mean(-1) - 1)
    assert picture.scores is not None
    torch.testing.assert_close(picture.scores[2], expected, rtol=0, atol=1e-8)
    assert list(picture.groups) == ["all heads"]


def test_an_input_scheme_shows_its_vectors():
    picture = position_picture(SinusoidalConfig(), 7)
    assert picture.scores is None
    assert picture.vectors is not None
    assert torch.equal(picture.vectors, sinusoids(torch.arange(7), 4 * WIDTH).double())
    assert picture.length == 7


def test_random_parameters_repeat_and_leave_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = position_picture(T5BiasConfig(), 10)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = position_picture(T5BiasConfig(), 10)
    assert first.by_distance is not None
    assert first.learned
    assert first.scores is not None
    assert second.scores is not None
    assert torch.equal(first.scores, second.scores)
    assert first.scores.unique().numel() > 8
    for distance in (-9, -1, 0, 4):  # a positive one: the key lies before the query
        assert first.by_distance[1, distance + 9] == first.scores[1, max(distance, 0), max(-distance, 0)]


@pytest.mark.parametrize("length", [0, 1025])
def test_lengths_of_pictures_out_of_range_are_refused(length: int):
    with pytest.raises(InputError, match=f"length: expected 1 to 1024, got {length}"):
        position_picture(AlibiConfig(), length)


def test_no_positions_have_no_picture():
    with pytest.raises(InputError, match="'none': nothing to draw"):
        position_picture(NoPositionConfig(), 4)


def test_text_of_a_small_scheme():
    text = position_text(position_picture(AlibiConfig(), 4, heads=1), 60, ASCII)
    assert text.split("\n") == [
        "alibi: added to the scores of equal tokens",
        "",
        "by how far the key lies before the query",
        "distance          0         1         2",
        "all heads         0  -0.00391  -0.00781",
        "",
        "scores, all heads (2 x 1 values a character, blank -0.0117,",
        "# 0)",
        "**:.",
        ".:**",
    ]


@pytest.mark.parametrize("width", [1, 9, 33, 80])
@pytest.mark.parametrize("kind", ["alibi", "t5", "sinusoidal", "shaw", "rope"])
def test_text_is_never_wider_than_the_terminal(kind: str, width: int):
    picture = position_picture(PositionConfig.from_dict(kind, "position"), 50)
    assert max(map(len, position_text(picture, width).split("\n"))) <= width


@pytest.mark.parametrize(("kind", "name"), [("t5", "a.png"), ("sinusoidal", "a.svg")])
def test_figures_are_written(tmp_path: Path, kind: str, name: str):
    pytest.importorskip("matplotlib")
    draw_position(position_picture(PositionConfig.from_dict(kind, "position"), 12), tmp_path / name)
    start = (tmp_path / name).read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start
