"""Learn then Test: its p-values are valid, and what it promises holds as often as it says."""

import math
from collections.abc import Iterator

import pytest
import torch
from scipy.stats import binom

from polyformer.applications.exits import CalibrateConfig, bentkus, hoeffding_bentkus, lowest_valid
from polyformer.core.errors import InputError


def test_p_values_are_the_formulas():
    losses = [0.0] * 90 + [0.1] * 10  # mean 0.01
    a, b = 0.01, 0.05
    entropy = a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))
    hoeffding = math.exp(-100 * entropy)
    by_binomial = math.e * float(binom.cdf(1, 100, 0.05))
    assert math.isclose(bentkus(losses, 0.05), by_binomial)
    assert math.isclose(hoeffding_bentkus(losses, 0.05), min(hoeffding, by_binomial))
    assert hoeffding_bentkus([0.5] * 100, 0.05) == 1.0


def test_the_fewest_texts_are_those_that_can_show_anything():
    asked = CalibrateConfig(risk=0.05, confidence=0.95)
    assert hoeffding_bentkus([0.0] * asked.least_texts, 0.05) <= 0.05
    assert hoeffding_bentkus([0.0] * (asked.least_texts - 1), 0.05) > 0.05


@pytest.mark.parametrize("risk", [0.05, 0.2])
def test_where_the_risk_is_greater_a_small_p_value_is_as_rare_as_it_says(risk: float):
    """Of 4000 samples whose losses have just that mean, at most a share p has a p-value of p or less."""
    torch.manual_seed(0)
    samples = torch.bernoulli(torch.full((4000, 100), risk))
    p_values = torch.tensor([hoeffding_bentkus(row, risk) for row in samples.tolist()])
    for level in (0.01, 0.05, 0.2):
        assert float((p_values <= level).double().mean()) <= level * 1.1


def test_testing_ends_at_the_first_threshold_that_fails():
    read = []

    def measured() -> Iterator[tuple[float, list[float]]]:
        for threshold, loss in ((0.9, 0.0), (0.8, 0.01), (0.7, 0.3), (0.6, 0.0)):
            read.append(threshold)
            yield threshold, [loss] * 100

    assert lowest_valid(measured(), risk=0.1, confidence=0.95) == 0.8
    assert read == [0.9, 0.8, 0.7]
    assert lowest_valid([(0.9, [0.5] * 100)], risk=0.1, confidence=0.95) is None


def test_over_200_calibrations_the_risk_holds_at_least_as_often_as_promised():
    """Losses of thresholds whose risks are known: with threshold j of 20 a text is spoilt with probability
    j / 100, by a loss of 0.2 to 1 (mean 0.6)."""
    torch.manual_seed(0)
    risk, confidence, texts = 0.05, 0.9, 150
    kept, chosen = 0, []
    for _ in range(200):
        tables = []
        for j in range(20):
            spoilt = torch.rand(texts) < j / 100
            tables.append((1 - j / 20, (spoilt * (0.2 + 0.8 * torch.rand(texts))).tolist()))
        threshold = lowest_valid(tables, risk, confidence)
        expected = 0.0 if threshold is None else round((1 - threshold) * 20) / 100 * 0.6
        kept += expected <= risk
        chosen.append(threshold)
    assert kept >= 200 * confidence
    assert sum(threshold is not None for threshold in chosen) > 150, (
        "a test that never passes keeps any promise"
    )


WRONG = [{"risk": 0.0}, {"confidence": 1.0}, {"measure": "taste"}, {"thresholds": (0.1, 0.5)}]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_by_name(wrong: dict):
    with pytest.raises(InputError, match=next(iter(wrong))):
        CalibrateConfig(**wrong)
