"""The measurement of generation: what it prints and returns, with and without its peer."""

import sys

import pytest

from polyformer import InputError
from polyformer.bench.generation import GenerationBench, run

SMALL = GenerationBench(batches=(1, 2), prompt=3, new_tokens=2, layers=1, repeats=1)


def test_both_models_write_the_same_tokens(capsys):
    pytest.importorskip("transformers")
    results = run(SMALL)
    assert [(one.model, one.batch) for one in results] == [
        ("transformers", 1), ("polyformer", 1), ("transformers", 2), ("polyformer", 2),
    ]  # fmt: skip
    for one in results:
        assert one.tokens_per_second == pytest.approx(one.batch * 2 / one.seconds)
        assert one.rate > 0
    assert capsys.readouterr().out.count("with the same tokens") == 2


def test_without_the_peer_ours_is_measured_alone(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert [one.model for one in run(SMALL)] == ["polyformer", "polyformer"]
    assert "transformers is not installed: no comparison" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": ()}, r"batches: expected sizes of 1 or more, got \[\]"),
        ({"new_tokens": 0}, "new_tokens: expected 1 or more, got 0"),
        ({"threads": 0}, "threads: expected 1 or more, got 0"),
    ],
)
def test_sizes_are_checked(options, message):
    with pytest.raises(InputError, match=message):
        GenerationBench(**options)
