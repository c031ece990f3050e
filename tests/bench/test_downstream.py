"""The downstream claim: its verdict, its texts, and a small run of the real thing."""

import csv
import gzip
import random

import pytest

from polyformer.bench.labelled_texts import bag_of_words, greater_class, prepare
from polyformer.bench.reproduce.downstream import (
    ALONE,
    SCALE,
    DownstreamClaim,
    Found,
    Outcome,
    chosen,
    recipe,
    verdict,
)
from polyformer.cli import main

MEMBERS = ("dense", "Linformer", "Performer", "Reformer", "Routing", "Sinkhorn", "SortCut")


def write(folder, train: int = 60, test: int = 20, reviews: bool = False) -> str:
    """Made-up texts whose label one word tells; every third one has label 0."""
    folder.mkdir()
    chance = random.Random(0)
    for name, count in (("train", train), ("test", test)):
        lines = []
        for number in range(count):
            label = int(number % 3 > 0)
            words = [chance.choice("abcdefgh") * 3 for _ in range(number % 30 + 3)]
            text = " ".join([("poor", "good")[label], *words])
            lines.append(f"{label}\t{9 * label + 1}\t{text}" if reviews else f"{text}\t{label}")
        data = ("\n".join(lines) + "\n").encode()
        if reviews:
            (folder / f"{name}.tsv.gz").write_bytes(gzip.compress(data))
        else:
            (folder / f"{name}.tsv").write_bytes(data)
    return str(folder)


@pytest.mark.parametrize(
    ("sst2", "imdb", "words"),
    [
        (
            (0.50, 0.78, 0.80, 0.79),
            (0.50, 0.75, 0.85, 0.86),
            "of dense: reproduced (SST-2 -1.0, IMDB +1.0; dense over itself only: SST-2 +2.0, IMDB +10.0)",
        ),
        (
            (0.50, 0.78, 0.80, 0.79),
            (0.50, 0.75, 0.85, 0.82),
            "of dense: not reproduced (SST-2 -1.0, IMDB -3.0;",
        ),
        (
            (0.50, 0.50, 0.51, 0.51),
            (0.50, 0.75, 0.85, 0.85),
            "not shown, for dense is no better than the greater class",
        ),
    ],
)
def test_verdict_needs_every_set_near_and_a_dense_model_that_learnt(sst2, imdb, words):
    names = (SCALE[0], ALONE, "dense", "Linformer")
    sets = {"sst2": sst2, "imdb": imdb}
    outcomes: Found = {name: dict(zip(names, map(Outcome, values))) for name, values in sets.items()}
    assert words in verdict(outcomes, points=2.0).text


def test_texts_are_spread_over_the_file_and_cut_alike_for_all(tmp_path):
    source = write(tmp_path / "imdb", reviews=True)
    texts = prepare("imdb", source, words=5, texts=20, tests=1000, vocabulary=60, out=tmp_path / "out")
    assert len(texts.train) == 20
    assert len(texts.test) == 20, "all there are"
    assert max(len(text.split()) for text, _ in texts.train) == 5
    assert {label for _, label in texts.train} == {"0"}, "every third row of the file"
    whole = prepare("imdb", source, words=5, texts=60, tests=20, vocabulary=60, out=tmp_path / "whole")
    assert greater_class(whole) == 13 / 20
    assert bag_of_words(whole) > 0.9
    lines = (tmp_path / "whole" / "test.tsv").read_text().splitlines()
    assert lines == ["text\tlabel", *(f"{text}\t{label}" for text, label in whole.test)]


def test_run_trains_every_member_on_both_sets_and_goes_on_with_them(tmp_path, capsys):
    words = ["reproduce", "downstream", "--sst2", write(tmp_path / "sst2")]
    words += ["--imdb", write(tmp_path / "imdb", reviews=True), "--out", str(tmp_path / "out")]
    words += ["--sst2-steps", "2", "--imdb-steps", "1", "--sst2-length", "16", "--imdb-length", "32"]
    words += ["--batch-tokens", "128", "--width", "16", "--vocabulary", "60", "--reversible"]
    assert main(words) == 0
    with (tmp_path / "out" / "downstream.csv").open() as file:
        rows = {(row["set"], row["member"]): row for row in csv.DictReader(file)}
    assert set(rows) == {(name, member) for name in ("sst2", "imdb") for member in (*SCALE, *MEMBERS)}
    assert all(float(row["seconds"]) > 0 for (_, member), row in rows.items() if member not in SCALE[:2])
    parameters = {member: int(rows["sst2", member]["parameters"]) for member in MEMBERS}
    assert parameters["Linformer"] == parameters["dense"] + 2 * 4 * 16, "E and F of k by n numbers"
    assert parameters["Reformer"] == parameters["dense"] - 16 * 17, "no keys of their own"
    assert "Linformer within 2 points of dense: " in capsys.readouterr().out
    assert main(words) == 0, "goes on with what is there"
    assert main([*words, "--lr", "1e-4"]) == 2
    assert "holds a run of other settings" in capsys.readouterr().err
    assert main([*words, "--members", "[Performr]"]) == 2
    assert "unknown member of `members` 'Performr': did you mean 'Performer'" in capsys.readouterr().err


def test_the_members_compared_are_always_trained():
    assert [*chosen(DownstreamClaim(sst2="sst2"))] == [*MEMBERS, ALONE]
    config = DownstreamClaim(sst2="sst2", members=("Routing",))
    assert [*chosen(config)] == ["dense", "Linformer", "Routing", ALONE]


def test_runs_differ_in_their_attention_alone(tmp_path):
    texts = prepare("sst2", write(tmp_path / "sst2"), 64, 60, 20, vocabulary=60, out=tmp_path / "out")
    config = DownstreamClaim(sst2="sst2")
    recipes = {member: recipe(config, "sst2", member, texts) for member in (*MEMBERS, ALONE)}
    taken = {member: recipe["model"].pop("encoder")["attention"] for member, recipe in recipes.items()}
    assert len({str(recipe) for recipe in taken.values()}) == 8
    assert all(recipe == recipes["dense"] for recipe in recipes.values())


def test_default_text_is_refused_by_name(tmp_path, capsys):
    assert main(["reproduce", "downstream", "--out", str(tmp_path)]) == 2
    assert "sst2, imdb: the built-in default text has no labels" in capsys.readouterr().err
    assert main(["reproduce", "downstream", "--sst2", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "sst2: expected a directory with train.tsv and test.tsv" in capsys.readouterr().err
