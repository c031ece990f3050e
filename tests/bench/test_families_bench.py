"""Public models beside transformers': the same outputs, what is measured, and bad input."""

import sys
from pathlib import Path

import pytest

from polyformer.bench.families import FamiliesBench, family_of, pair, run, texts
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizer_loading import build_tokenizer

SMALL = {"layers": 1, "batch": 2, "batches": 1, "length": 12, "repeats": 1}


def test_full_rows(capsys):
    pytest.importorskip("transformers")
    results = run(FamiliesBench(**SMALL, backward=True))  # type: ignore[arg-type]
    assert list(results) == ["bert-base forward", "bert-base training step"]
    assert min(results.values()) > 0
    said = capsys.readouterr().out
    assert "100% of the tokens are real" in said
    assert float(said.partition("differ by ")[2].split()[0]) < 1e-4


def test_real_texts_are_padded_to_the_longest(tmp_path: Path):
    rows = ["1\t9\tgood good film", "0\t2\tbad", "1\t8\tgood", "0\t1\tbad bad bad bad film"]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n")
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), ["good bad film"] * 9)
    tokenizer.save(tmp_path)
    config = FamiliesBench(batch=2, batches=2, length=64, data=str(tmp_path), tokenizer=str(tmp_path))
    results = texts(config, 60)
    expected = [[len(tokenizer.encode(row.split("\t")[2])) for row in rows[i : i + 2]] for i in (0, 2)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in results] == expected
    assert [batch["input_ids"].shape[1] for batch in results] == [max(lengths) for lengths in expected]


def test_the_head_can_be_chosen():
    pytest.importorskip("transformers")
    ours, theirs = pair("bert-base", FamiliesBench(layers=1, head="classify"))
    assert ours.config.head.kind == "classify"
    assert type(theirs).__name__ == "BertForSequenceClassification"
    assert "bert-base" in family_of()


def test_without_the_peer_nothing_is_compared(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run(FamiliesBench()) == {}
    assert "transformers is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"presets": ("bret",)}, "'bert-base'"), ({"data": "x"}, "expected both"), ({"batch": 0}, "batch")],
)
def test_bad_input(changes: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        FamiliesBench(**changes)  # type: ignore[arg-type]
