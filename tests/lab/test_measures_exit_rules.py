"""The layers that rules for exits need at equal risk, against thresholds that are tried in turn."""

from typing import Any

import pytest
import torch

from polyformer.models.presets import create_model
from polyformer_lab.measures.exits import lowest, scorer


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
