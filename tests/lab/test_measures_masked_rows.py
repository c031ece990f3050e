"""Masked loss on equal rows, retrieval of translations, and pairs in two directions."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from small_sources import write_sources

from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.encoders import directions, matched
from polyformer_lab.measures.scores import masked_rows
from polyformer_lab.study import Study


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
