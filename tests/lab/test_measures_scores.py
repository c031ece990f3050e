"""Measurements of finished runs: scores, sizes and keys, masked losses, and converted models."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_sources import write_sources

from polyformer.attention.patterns import Full, Local1D, Local2D
from polyformer.models.checkpoints import from_pretrained
from polyformer.models.presets import create_model
from polyformer.training.metrics import LINES
from polyformer.training.recipes.fit import Fitted
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.encoders import directions, matched
from polyformer_lab.measures.scores import keys, masked_rows, scores_and_sizes
from polyformer_lab.study import Study


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


def test_keys_are_counted_as_a_decoder_sees_them():
    assert keys(Full(), 12) == 6.5
    assert keys(Local1D(4, 0), 12) == 2.5
    assert keys(Local2D((3, 4), (3, 4), (0, 0, 0)), 12) == 6.5


def test_packed_rows_have_the_loss_of_the_run_and_pairs_another(tmp_path: Path):
    study = Study.load("masked-choices").in_quick()
    sources = Sources(study.needs, str(write_sources(tmp_path)), {})
    text = {split: f"{sources.places['wikitext2']}/{split}.txt.gz" for split in ("train", "valid")}
    study = study.changed(
        {"data": {"path": text["train"], "validation": text["valid"], "format": "articles"}}
    )
    rows, pairs, *_ = cells_of(study, tmp_path / "cells", sources)
    measured, other = masked_rows(rows, 64), masked_rows(pairs, 64)
    assert measured["masked.loss"] == pytest.approx(measured["validation.loss"], rel=1e-5)
    assert other["masked.loss"] < other["validation.loss"] - 0.5, "without the loss of the pairs"


def test_centred_vectors_find_their_translation():
    generator = np.random.default_rng(0)
    source = generator.normal(size=(20, 8))
    assert matched(source, 2 * source + 100) == 1
    swapped = source.copy()
    swapped[[0, 1]] = source[[1, 0]]
    assert matched(source, swapped) == pytest.approx(0.9)


def test_both_directions_share_no_sentence_and_name_their_target(tmp_path: Path):
    source = str(write_sources(tmp_path) / "multi30k")
    directions(tmp_path, source, rare=3, common=5, held_out=4)
    files = {name: (tmp_path / f"{name}.jsonl").read_text() for name in ("rare", "both", "validation")}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}
    assert {name: len(each) for name, each in rows.items()} == {"rare": 3, "both": 8, "validation": 4}
    assert rows["both"][:3] == rows["rare"]
    assert [row["source"][:3] for row in rows["both"]] == ["=en"] * 3 + ["=de"] * 5
    english = [row["target"] for row in rows["rare"]] + [row["source"][4:] for row in rows["both"][3:]]
    with gzip.open(f"{source}/train.en.gz", "rt") as text:
        assert english == text.read().splitlines()[:8]


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
