"""What is said of returns that were asked for and achieved."""

import pytest

from polyformer_lab.measures.returns_achieved import summary


def test_ranks_are_compared_and_the_largest_return_is_named():
    row = summary({200.0: [180.0, 184.0], 20.0: [30.0, 34.0], 100.0: [80.0, 84.0]}, 100.0)
    assert row == {"correlation": pytest.approx(1), "largest": 200.0, "best": 182.0, "data_mean": 100.0}
    other = summary({20.0: [90.0], 100.0: [80.0], 200.0: [180.0]}, 100.0)
    assert other["correlation"] == pytest.approx(0.5)
