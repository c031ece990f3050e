"""Curves over seeds: their means, their errors and their bands."""

import math

import numpy as np
import pytest

from polyformer.core.measuring import new_figure
from polyformer_lab.comparison import FEW, Point, caption, draw_band, mean_curves, validation_metric

POINTS = [("a", 10.0, 1.0), ("a", 10.0, 2.0), ("a", 10.0, 6.0), ("a", 20.0, 4.0), ("b", 10.0, math.inf)]
ERROR = math.sqrt(7 / 3)


def test_means_and_standard_errors():
    curves = mean_curves(POINTS)
    assert curves["a"] == [Point(10.0, 3.0, pytest.approx(ERROR), 3), Point(20.0, 4.0, None, 1)]  # type: ignore[arg-type]
    assert curves["b"] == []


@pytest.mark.parametrize("length", [2, FEW + 5])
def test_the_band_is_the_mean_plus_and_minus_the_error(length: int):
    axis = new_figure(1, 1).subplots()
    draw_band(axis, "a", [Point(float(x), 3.0, 0.5, 3) for x in range(length)])
    assert axis.lines[0].get_ydata().tolist() == [3.0] * length  # type: ignore[union-attr]
    corners = np.concatenate([path.vertices for path in axis.collections[-1].get_paths()])
    assert (corners[:, 1].min(), corners[:, 1].max()) == (2.5, 3.5)
    assert (len(axis.collections) == 2) == (length < FEW), "bars for few points"


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ([3, 3], "mean over 3 seeds; band: mean ± one standard error of the mean over the seeds"),
        ([2, 3], "mean over 2 to 3 seeds; band: mean ± one standard error of the mean over the seeds"),
        ([1], "one seed, without a band"),
    ],
)
def test_the_caption_says_what_the_band_is(seeds: list[int], expected: str):
    assert caption({"a": [Point(0.0, 1.0, 0.1, count) for count in seeds]}) == expected


def test_the_loss_of_validation_is_drawn_or_another_metric():
    assert validation_metric([{"loss": 1}, {"valid_return": 1, "valid_loss": 2}]) == "valid_loss"
    assert validation_metric([{"loss": 1}, {"valid_return": 1}]) == "valid_return"
    assert validation_metric([{"loss": 1}]) is None
