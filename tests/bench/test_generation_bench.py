"""The measurement of generation: what it prints and returns, with and without its peer."""

import dataclasses
import sys

import pytest

from polyformer import InputError
from polyformer.bench.generation import MODELS, GenerationBench, pair, run

SMALL = GenerationBench(
    models=("t5-small",), batches=(1, 2), beams=(3,), prompt=3, new_tokens=2, layers=1, repeats=1
)
WAYS = [(1, 1), (2, 1), (1, 3)]


def test_both_libraries_write_the_same_tokens(capsys):
    pytest.importorskip("transformers")
    results = run(SMALL)
    assert [(line.library, line.batch, line.beams) for line in results] == [
        (library, *way) for way in WAYS for library in ("transformers", "polyformer")
    ]
    for line in results:
        assert line.tokens_per_second == pytest.approx(line.batch * 2 / line.seconds)
        assert line.rate > 0
    assert capsys.readouterr().out.count("with the same tokens") == 3


@pytest.mark.parametrize("model", ["gpt2", "t5-small"])
def test_ctranslate2_writes_the_same_tokens(model, capsys, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("ctranslate2")
    monkeypatch.setitem(MODELS, model, (MODELS[model][0], {"vocab_size": 1000}))
    libraries = ("ctranslate2", "ctranslate2-int8", "polyformer")
    results = run(dataclasses.replace(SMALL, models=(model,), libraries=libraries))
    assert [line.library for line in results] == [*libraries] * 3
    out = capsys.readouterr().out
    assert out.count("as fast as ctranslate2, with the same tokens") == 3


@pytest.mark.parametrize("name", MODELS)
def test_both_libraries_have_models_of_one_size(name, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, name, (MODELS[name][0], {**MODELS[name][1], "vocab_size": 1000}))
    sides = pair(name, dataclasses.replace(SMALL, models=(name,)))
    both = sides.ours, sides.theirs
    assert len({sum(parameter.numel() for parameter in model.parameters()) for model in both}) == 1


def test_without_the_peer_ours_is_measured_alone(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert [line.library for line in run(SMALL)] == ["polyformer"] * 3
    assert "transformers: no comparison: transformers is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": (0,)}, r"batches: expected sizes of 1 or more, got \[0\]"),
        ({"beams": (1,)}, r"beams: expected 2 or more, got \[1\]"),
        ({"new_tokens": 0}, "new_tokens: expected 1 or more, got 0"),
        ({"libraries": ("ctranslat",)}, "unknown library 'ctranslat': did you mean 'ctranslate2'"),
        ({"threads": 0}, "threads: expected 1 or more, got 0"),
        ({"models": ("gpt2", "bart")}, "unknown model 'bart': did you mean 'bart-base'"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        GenerationBench(**options)
