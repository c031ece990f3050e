"""Nested lists as encoders of them see them, and training on what is drawn."""

import dataclasses
from pathlib import Path

import pytest
import torch

from polyformer import InputError
from polyformer_lab import listops
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.generated import drawn, outermost
from polyformer_lab.study import Study

LISTS = {"depth": 5, "items": 6, "nested": 0.4}


def test_lists_are_long_and_all_see_the_same():
    batch, depths = drawn(20, torch.Generator().manual_seed(0), **LISTS, longest=64)
    lengths = batch["attention_mask"].sum(1)
    assert int(lengths.min()) >= 32
    assert int(lengths.max()) <= 64
    assert bool((outermost(batch["input_ids"], batch) == listops.CLOSE).all())
    assert torch.equal(outermost(depths, batch), depths.amax(1))
    again, _ = drawn(20, torch.Generator().manual_seed(0), **LISTS, longest=64)
    assert torch.equal(again["input_ids"], batch["input_ids"])


def test_lists_of_a_depth_are_exactly_as_deep():
    _, depths = drawn(20, torch.Generator().manual_seed(0), **LISTS, exactly=3)
    assert depths.amax(1).tolist() == [3] * 20


def test_a_begun_training_is_resumed_only_with_its_settings(tmp_path: Path):
    study = Study.load("act").in_quick()
    cell = cells_of(study, tmp_path, Sources({}, None, {}))[0]
    rows = cell.run()
    (cell.folder / "rows.json").unlink()
    assert cell.run() == rows
    (cell.folder / "rows.json").unlink()
    other = dataclasses.replace(cell, options={**cell.options, "lr": 0.5})
    with pytest.raises(InputError, match="other settings"):
        other.run()
