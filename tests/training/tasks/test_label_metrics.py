"""Metrics of labels and numbers that GLUE and SuperGLUE report, against values by hand."""

import pytest

from polyformer.core.errors import InputError
from polyformer.training.tasks.classify import correlations
from polyformer.training.tasks.labels import label_metrics

CONFUSION = [50.0, 10.0, 5.0, 35.0]  # [label, prediction]: TN, FP, FN, TP


def test_f1_and_matthews_are_their_equations():
    metrics = label_metrics(["f1", "matthews"], CONFUSION, ["0", "1"])
    assert metrics["f1"] == pytest.approx(2 * 35 / (2 * 35 + 10 + 5))
    root = ((35 + 10) * (35 + 5) * (50 + 10) * (50 + 5)) ** 0.5
    assert metrics["matthews"] == pytest.approx((35 * 50 - 10 * 5) / root)
    constant = label_metrics(["f1", "matthews"], [60.0, 0.0, 40.0, 0.0], ["0", "1"])
    assert constant == {"f1": 0.0, "matthews": 0.0}
    assert label_metrics([], CONFUSION, ["a"]) == {}
    with pytest.raises(InputError, match=r"metrics: f1 is of two labels, got 3"):
        label_metrics(["f1"], [0.0] * 9, ["a", "b", "c"])


def test_correlations_are_their_equations():
    metrics = correlations([(1.0, 1.0), (2.0, 2.0), (9.0, 3.0)])
    assert metrics["spearman"] == pytest.approx(1)
    assert metrics["pearson"] == pytest.approx(8 / (38 * 2) ** 0.5)
    assert metrics["loss"] == pytest.approx(12)
    assert correlations([(1.0, 1.0), (1.0, 2.0)]) == {"loss": 0.5, "pearson": 0.0, "spearman": 0.0}
    assert correlations([])["pearson"] == 0
