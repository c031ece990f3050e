"""Thresholds of exits are chosen by their definition."""

from polyformer_lab.measures.exits import Scores, Thresholds, choose, each


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
