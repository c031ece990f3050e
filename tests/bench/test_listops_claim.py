"""The claim on nested lists: its rule, its lists, and a small run of the real thing."""

import csv
import dataclasses
from pathlib import Path

import pytest
import torch

from polyformer import InputError
from polyformer.bench.experiment import DIFFERS, REPRODUCED, UNSHOWN
from polyformer.bench.reproduce.listops import (
    ALONE,
    BEHIND,
    CLOSE,
    DENSE,
    EXPERIMENT,
    ListOpsClaim,
    drawn,
    run,
    verdict,
)
from polyformer.data import listops


def shares(**changes: float) -> dict[tuple[str, int], float]:
    """By mechanism over two seeds, 0.01 above and below."""
    values = {DENSE: 0.9, ALONE: 0.3, **dict.fromkeys(CLOSE, 0.88), **dict.fromkeys(BEHIND, 0.6), **changes}
    return {(name, seed): value + 0.02 * seed - 0.01 for name, value in values.items() for seed in (0, 1)}


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({}, REPRODUCED, ": reproduced (points beside dense attention's 90.0"),
        ({"Reformer": 0.97}, REPRODUCED, "Reformer +7.0"),
        ({"Linformer": 0.84}, DIFFERS, ": not reproduced: Linformer is not near ("),
        ({"local": 0.81}, DIFFERS, ": not reproduced: local is not far ("),
        ({ALONE: 0.81}, UNSHOWN, "not shown, for dense has hardly learnt"),
    ],
)
def test_means_over_the_seeds_decide(changes: dict[str, float], outcome: str, words: str):
    judged = verdict(shares(**changes))
    assert judged.outcome == outcome
    assert words in judged.text


def test_without_a_mechanism_there_is_no_verdict():
    assert verdict({(DENSE, 0): 0.9}).outcome == UNSHOWN


def test_lists_are_long_and_all_see_the_same():
    config = ListOpsClaim(longest=64)
    batch = drawn(config, 20, torch.Generator().manual_seed(0))
    lengths = batch["attention_mask"].sum(1)
    assert int(lengths.min()) >= 32
    assert int(lengths.max()) <= 64
    last = batch["input_ids"][torch.arange(20), lengths - 1]
    assert bool((last == listops.CLOSE).all())
    again = drawn(config, 20, torch.Generator().manual_seed(0))
    assert torch.equal(again["input_ids"], batch["input_ids"])


def test_a_run_writes_its_figures_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = ListOpsClaim.from_dict({**_quick(), "mechanisms": ["dense", "Linformer"], "out": str(tmp_path)})
    first = run(config)
    with (tmp_path / "listops.csv").open() as file:
        assert [row["mechanism"] for row in csv.DictReader(file)] == ["dense", "Linformer"]
    assert (tmp_path / "listops.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first
    assert "no verdict: it needs dense" in capsys.readouterr().out
    with pytest.raises(InputError, match="other settings"):
        run(dataclasses.replace(config, lr=0.5))


def _quick() -> dict[str, object]:
    return {name: list(x) if isinstance(x, tuple) else x for name, x in EXPERIMENT.quick.items()}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mechanisms": ("Lingformer",)}, "did you mean 'Linformer'"),
        ({"seeds": ()}, "seeds: expected one or more"),
        ({"longest": 8}, "longest"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        ListOpsClaim(**wrong)  # type: ignore[arg-type]
