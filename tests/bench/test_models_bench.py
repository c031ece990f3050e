"""Whole models beside transformers': the same weights, the same outputs, and what is printed."""

import dataclasses
import sys
from typing import Any

import pytest

from polyformer import InputError
from polyformer.bench.models import PAIRS, ModelsBench, agreement, run

SMALL = ModelsBench(
    length=40,
    layers=2,
    hidden_size=12,
    heads=3,
    vocab_size=30,
    window=4,
    marked=2,
    block=2,
    random=2,
    repeats=1,
    dtype="float64",
)


@pytest.mark.parametrize("kind", list(PAIRS))
def test_both_models_compute_the_same(kind: str):
    pytest.importorskip("transformers")
    ours, theirs, inputs = PAIRS[kind](SMALL)
    if kind == "longformer":  # its softmax is in float32
        ours, theirs = ours.float(), theirs.float()
    assert agreement(ours, theirs, inputs) == 1.0
    with_other_weights, _, _ = PAIRS[kind](dataclasses.replace(SMALL, heads=1))
    assert agreement(with_other_weights.to(next(theirs.parameters()).dtype), theirs, inputs) < 0.5


def test_what_is_measured(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    results = run(dataclasses.replace(SMALL, dtype="float32"))
    passes, models = ("forward", "forward + backward"), ("transformers", "polyformer")
    assert list(results) == [
        f"{kind} {name} {model}" for kind in PAIRS for name in passes for model in models
    ]
    assert min(results.values()) > 0
    text = capsys.readouterr().out
    assert text.count("100.0% of the tokens agree to 1e-3") == 2
    assert text.count("times as fast") == 4


def test_without_the_peer_nothing_is_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(SMALL) == {}
    assert "transformers is not installed: no comparison" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("longformr",)}, "unknown model 'longformr': did you mean 'longformer'"),
        ({"window": 5}, "window: expected an even number of keys on both sides, got 5"),
        ({"length": 41}, "length: expected a multiple of block 2 above 18, below which .* got 41"),
        ({"length": 18}, "length: expected a multiple of block 2 above 18"),
        ({"repeats": 0}, "repeats: expected 1 or more, got 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changes)
