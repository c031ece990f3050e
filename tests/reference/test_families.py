"""Every family of the table with every head, loaded from transformers' files and saved back.

Predictions, hidden states, losses, gradients and the way back; see family_table.py for what meets what.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exactness import PATCHES
from families import verify
from family_inputs import PROBLEMS, case
from family_table import TABLE, language_model, their_model

from pairwise import pairwise
from polyformer.models.checkpoints import FAMILIES

PARTICULAR = (
    "DoubleHeadsModel",
    ("longformer", "ForQuestionAnswering"),
    ("big_bird", "ForQuestionAnswering"),
)
"""Heads that take inputs of their own, each with a test of its own."""


def cases(name: str) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Classes with configurations, sides of padding and kinds of labels, of a family."""
    entry, first = TABLE[name], language_model(name)
    for config in (*entry.configs, *entry.trunks):
        for side in entry.sides:
            yield first, config, side, "one"
    others = [
        task for task in FAMILIES[name].tasks if task != first and not {task, (name, task)} & {*PARTICULAR}
    ]
    kinds = ["one", list(PROBLEMS)[1 + list(TABLE).index(name) % 3]]
    for task, config, side in pairwise(others, entry.configs[-2:], entry.sides):
        texts = task == "ForSequenceClassification" and "problem_type" not in entry.sizes
        yield task, config, side, kinds.pop() if texts and kinds else "one"


POOLED = (
    *("albert", "bert", "big_bird", "camembert", "esm", "longformer", "megatron-bert", "mpnet", "roberta"),
    *("xlm-roberta", "xlm-roberta-xl"),
)
"""Families whose model without a head pools too."""


def right_alone(name: str, task: str, config: dict[str, Any]) -> bool:
    """Whether transformers takes padding on the left for text: in the slot that it pools, or in a decoder."""
    if task in TABLE[name].right or config.get("causal"):
        return True
    if (
        language_model(name) not in ("ForMaskedLM", "WithLMHeadModel")
        or config.get("classifier_pooling") == "mean"
    ):
        return False
    pooled = ["ForSequenceClassification", "ForNextSentencePrediction", "ForMultipleChoice"]
    pooled += [] if name == "electra" else ["ForPreTraining"]
    return task in pooled or (task == "Model" and name in POOLED)


UNRECORDED = (
    *("beit", "clip_text_model", "clip_vision_model", "deit", "dinov2", "mamba2", "reformer"),
    *("nemotron_h", "siglip_text_model", "siglip_vision_model", "vit"),
)
"""Families whose last hidden states in transformers are those before the norm, or whose layers are fewer
here."""

CASES = [
    (name, task, config, "right" if right_alone(name, task, config) else side, problem)
    for name in TABLE
    if TABLE[name].configs
    for task, config, side, problem in cases(name)
]
CASES = [row for number, row in enumerate(CASES) if row not in CASES[:number]]
IDS = [f"{row[0]}-{row[1]}-{number}" for number, row in enumerate(CASES)]


@pytest.fixture(autouse=True)
def numpy_state() -> Iterator[None]:
    """BigBird of transformers seeds numpy's global generator in every layer."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


@pytest.mark.parametrize(("name", "task", "config", "side", "problem"), CASES, ids=IDS)
def test_all_that_both_compute_is_equal(
    name: str,
    task: str,
    config: dict[str, Any],
    side: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    PATCHES.get(name, lambda patch: None)(monkeypatch)
    tags = {"ForSequenceClassification": PROBLEMS[problem], "ForTokenClassification": {"num_labels": 5}}
    theirs = their_model(name, task, **config, **tags.get(task, {}))
    without: dict[str, Any] = {"hidden": False} if name in UNRECORDED else {}
    if name == "reformer":  # which has gradients in training alone
        without["gradients"] = False
    verify(theirs, folder=tmp_path, **without, **vars(case(theirs, task, side, problem)))
