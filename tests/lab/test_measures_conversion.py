"""A trained model with another attention: what is measured as converted is what training goes on from."""

from pathlib import Path

import pytest
import torch

from polyformer.models.checkpoints import from_pretrained
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.study import Study


def test_converted_models_are_measured_and_kept(tmp_path: Path):
    study = Study.load("conversion").in_quick()
    attentions = {"dense": None, "window": "Window(128)", "linformer": "linformer(k=8, max_length=128)"}
    grid = {name: dict(study.grid["attention"][name]) for name in ("start", *attentions)}
    grid["start"]["measure.attentions"] = attentions
    study = study.changed({"grid": {"attention": grid}})
    start, *on = cells_of(study, tmp_path, Sources(study.needs, None, {}))
    rows = {row["converted"]: row for row in start.run()}
    before = start.fitted.scores["validation"]["perplexity"]
    assert rows["dense"]["perplexity"] == pytest.approx(before, rel=1e-6)
    assert rows["window"]["perplexity"] == pytest.approx(before, rel=1e-5)  # it covers the rows
    assert rows["linformer"]["perplexity"] != pytest.approx(before, rel=1e-5)
    assert [row["new_tensors"] for row in rows.values()] == [0, 0, 2]
    after = {cell.labels[0]: cell.run()[0]["perplexity"] for cell in on}
    assert after["window"] == pytest.approx(after["dense"], rel=1e-5)
    assert len({before, after["dense"], after["linformer"]}) == 3
    table = from_pretrained(start.folder / "window").state_dict()["tokens.weight"]
    torch.testing.assert_close(table, start.fitted.model.state_dict()["tokens.weight"])
