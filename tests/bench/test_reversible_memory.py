"""The claim that reversible memory is flat in depth: its verdict, what is kept, and a small run."""

import csv

import pytest

from polyformer.bench.reproduce import reversible_memory
from polyformer.bench.reproduce.reversible_memory import ReversibleMemoryClaim, Size, kept_mib, run, verdict
from polyformer.core.errors import InputError


@pytest.mark.parametrize(
    ("deep", "words"),
    [((1.1, 2.2), ": reproduced (24 layers over 4: pre 5.00 kept"), ((1.1, 3.0), ": not reproduced")],
)
def test_verdict_needs_both_numbers_flat(deep: tuple[float, float], words: str):
    memory = {("pre", 4): (1.0, 2.0), ("pre", 24): (5.0, 9.0), ("reversible", 4): (1.0, 2.0)}
    assert words in verdict({**memory, ("reversible", 24): deep}).text


def test_a_forward_pass_keeps_two_tensors_for_any_depth():
    """Beside what the end of the stack keeps: the mean, its norm and the loss."""
    claim = ReversibleMemoryClaim(length=64, width=8, heads=2)
    sizes = [(block, layers) for block in ("pre", "reversible") for layers in (2, 12)]
    kept = {(block, layers): kept_mib(Size(claim, block, layers)) for block, layers in sizes}
    assert kept["reversible", 12] == kept["reversible", 2] > 0
    assert kept["pre", 12] > 4 * kept["pre", 2]


def test_run_writes_a_table_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reversible_memory, "_peak", lambda size: 1.0)
    results = run(ReversibleMemoryClaim(layers=(1, 2), width=8, heads=2, length=16, out=str(tmp_path)))
    with (tmp_path / "reversible_memory.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results) == 4
    assert (tmp_path / "reversible_memory.png").read_bytes().startswith(b"\x89PNG")
    assert "reversible memory is flat in depth: " in capsys.readouterr().out


def test_what_is_wrong_is_named():
    with pytest.raises(InputError, match="layers: expected two depths or more"):
        ReversibleMemoryClaim(layers=(4,))
