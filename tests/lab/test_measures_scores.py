"""The scores of a run: sizes of its model, and what its log says of losses and speed."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyformer.models.presets import create_model
from polyformer.training.metrics import LINES
from polyformer.training.recipes.fit import Fitted
from polyformer_lab.measures.scores import scores_and_sizes


def test_sizes_losses_and_speed(tmp_path: Path):
    steps = [{"step": 10 * n, "loss": float(n), "seconds": 2.0 * n + (n == 3)} for n in range(1, 8)]
    (tmp_path / LINES).write_text("".join(json.dumps(row) + "\n" for row in steps))
    sizes = {"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 50}
    rows, unused = [], Any
    for groups in (3, 1):
        model = create_model("decoder-tiny", **sizes, num_hidden_groups=groups)
        fitted = Fitted(unused, unused, unused, model, unused, {"test": {"loss": 3.0}})  # type: ignore[arg-type]
        rows.append(scores_and_sizes(fitted, tmp_path))
    assert rows[0]["layer_parameters"] == 3 * rows[1]["layer_parameters"]
    saved = rows[0]["parameters"] - rows[1]["parameters"]
    assert saved == rows[0]["layer_parameters"] - rows[1]["layer_parameters"]
    assert rows[0]["test.loss"] == 3
    assert rows[0]["training.loss"] == 5
    assert rows[0]["seconds"] == pytest.approx(0.2)
