"""`polyformer bench attached`, small."""

import pytest

from polyformer.bench.attached import AttachedBench, run
from polyformer.core.errors import InputError


def test_both_passes_of_both_are_timed(capsys: pytest.CaptureFixture[str]):
    config = AttachedBench(length=64, layers=1, hidden_size=16, heads=2, repeats=1)
    results = run(config)
    assert len(results) == 4
    assert all(seconds > 0 for seconds in results.values())
    assert "forward + backward   Window(before=64, after=64, dilation=1)" in capsys.readouterr().out


def test_sizes_are_checked():
    with pytest.raises(InputError, match="length: expected 1 or more, got 0"):
        AttachedBench(length=0)
