"""Rules for exits at equal risk, and thresholds that are chosen by their definition."""

from typing import Any

import pytest
import torch

from polyformer.models.presets import create_model
from polyformer_lab.measures.exits import Scores, Thresholds, choose, each, lowest, scorer


def test_the_lowest_threshold_keeps_the_risk():
    risk = {True: 0.0, False: 0.5}
    assert lowest(lambda at: (risk[at >= 0.3], 2.0), 0.1) == pytest.approx(0.3, abs=1e-4)
    assert lowest(lambda at: (0.5, 2.0), 0.1) == 1.0, "if no threshold is good, no token leaves"


def test_a_score_compares_with_the_whole_model():
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 30}
    options |= {"num_hidden_layers": 3, "initializer_range": 0.5, "depth": "exits(rule=softmax)"}
    model = create_model("decoder-tiny", **options).eval()
    score = scorer(model, torch.randint(30, (4, 8)))
    assert score(1.0) == (0.0, 3.0)
    other, layers = score(0.0)
    assert layers == 1.0, "every token leaves at the first exit"
    assert other > 0.1
    assert 1 < score(0.3)[1] < 3


def test_the_threshold_of_the_fewest_layers_is_chosen_among_the_good():
    searched = {0.9: Scores(30, 5), 0.5: Scores(29.9, 3), 0.1: Scores(20, 1)}
    assert choose(searched, 29.5) == 0.5
    assert choose(searched, 31) is None


def test_thresholds_for_each_exit_are_searched_from_that_of_all():
    def tried(thresholds: Thresholds) -> Scores:
        assert isinstance(thresholds, tuple)
        first, second = thresholds
        return Scores(30 - (first < 0.5) - (second < 0.5), 3 * first + 2 * second)

    def searched(least: float, sweeps: int = 1) -> tuple[float, ...]:
        start = (0.5, 0.5)
        return each(start, tried(start), (0.9, 0.5, 0.1), sweeps, tried, least)

    assert searched(29) == (0.1, 0.5)
    assert searched(28) == (0.1, 0.1)
    assert searched(29.5) == searched(0, sweeps=0) == (0.5, 0.5)
