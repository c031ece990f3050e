"""Every other bench at a tiny size: what it runs, and what it reports; nothing depends on speed."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer.applications.retrieval.store import open_folder
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer
from polyformer_lab.bench import generation, models, neighbours, overhead, passes
from polyformer_lab.bench.overhead import plain_decoder
from polyformer_lab.bench.passes import agreement
from polyformer_lab.bench.rows import OURS, MeasuredCase, Table

BOTH = {"transformers", OURS}


def cases_of(table: Table) -> dict[str, MeasuredCase]:
    """The cases of all rows, in which everyone took some time."""
    cases = {f"{record.row} {case.name}".strip(): case for record in table.records for case in record.cases}
    assert all(0 < s.fastest <= s.median for case in cases.values() for s in case.seconds.values())
    return cases


def test_attached_patterns() -> None:
    pytest.importorskip("transformers")
    bench = models.AttachedBench(length=64, layers=1, hidden_size=16, heads=2, repeats=1)
    table = models.run_attached(bench)
    cases = cases_of(table)
    assert [*cases] == ["attached forward", "attached forward and backward"]
    assert all(case.seconds.keys() == BOTH for case in cases.values())
    assert "Window(before=64, after=64, dilation=1) attached" in table.records[0].what


FAMILY = {"layers": 1, "batch": 2, "batches": 1, "length": 12, "repeats": 1}


def test_families_with_full_rows() -> None:
    pytest.importorskip("transformers")
    cases = cases_of(passes.run_families(passes.FamiliesBench(**FAMILY, backward=True)))  # type: ignore[arg-type]
    assert [*cases] == ["bert-base forward", "bert-base forward and backward"]
    facts = cases["bert-base forward"].facts["transformers"]
    assert (facts["real tokens"], facts["agrees"]) == (1, 1)
    assert facts["differs by"] < 1e-4


def test_real_texts_are_padded_to_the_longest(tmp_path: Path) -> None:
    rows = ["1\t9\tgood good film", "0\t2\tbad", "1\t8\tgood", "0\t1\tbad bad bad bad film"]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n")
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), ["good bad film"] * 9)
    tokenizer.save(tmp_path)
    bench = passes.FamiliesBench(batch=2, length=64, data=str(tmp_path), tokenizer=str(tmp_path))
    results = passes.texts(bench, 60)
    expected = [[len(tokenizer.encode(row.split("\t")[2])) for row in rows[i : i + 2]] for i in (0, 2)]
    assert [batch["attention_mask"].sum(1).tolist() for batch in results] == expected
    assert [batch["input_ids"].shape[1] for batch in results] == [max(lengths) for lengths in expected]
    random = passes.texts(passes.FamiliesBench(lengths=(3, 1), batches=1), 60)
    assert [batch["attention_mask"].tolist() for batch in random] == [[[1, 1, 1], [1, 0, 0]]]


def test_the_head_of_a_family_can_be_chosen() -> None:
    pytest.importorskip("transformers")
    sides = passes.pair("bert-base", passes.FamiliesBench(layers=1, head="classify"))
    assert sides.ours.config.head.kind == "classify"
    assert type(sides.theirs).__name__ == "BertForSequenceClassification"


WRITING = generation.GenerationBench(
    models=("t5-small",), batches=(1, 2), beams=(3,), prompt=3, new_tokens=2, layers=1, repeats=1
)
WAYS = ["one text", "2 texts", "one text, 3 beams"]


def test_both_libraries_write_the_same_tokens() -> None:
    pytest.importorskip("transformers")
    cases = cases_of(generation.run(WRITING))
    assert [*cases] == [f"t5-small {way}" for way in WAYS]
    for case, texts in zip(cases.values(), (1, 2, 1)):
        assert case.seconds.keys() == BOTH
        assert case.facts["transformers"]["same tokens"] == 1
        assert case.facts[OURS]["tokens/s"] == pytest.approx(texts * 2 / case.seconds[OURS].median)
        assert case.facts[OURS]["GB of weights/s"] > 0


@pytest.mark.parametrize("model", ["gpt2", "t5-small"])
def test_ctranslate2_writes_the_same_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("ctranslate2")
    monkeypatch.setitem(generation.MODELS, model, (generation.MODELS[model][0], {"vocab_size": 1000}))
    libraries = ("ctranslate2", "ctranslate2-int8", OURS, "polyformer-int8")
    table = generation.run(dataclasses.replace(WRITING, models=(model,), libraries=libraries))
    for case in cases_of(table).values():
        assert [*case.seconds] == [*libraries]
        assert case.facts["ctranslate2"]["same tokens"] == 1
    assert {(each.ours, each.peer) for each in table.records[0].comparisons} == {
        (OURS, "ctranslate2"),
        ("polyformer-int8", "ctranslate2-int8"),
        ("polyformer-int8", OURS),
    }


@pytest.mark.parametrize("name", generation.MODELS)
def test_both_libraries_have_models_of_one_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    kind, changes = generation.MODELS[name]
    monkeypatch.setitem(generation.MODELS, name, (kind, {**changes, "vocab_size": 1000}))
    sides = generation.pair(name, WRITING)
    both = sides.ours, sides.theirs
    assert len({sum(parameter.numel() for parameter in model.parameters()) for model in both}) == 1


def test_without_transformers_ours_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (record,) = generation.run(WRITING).records
    assert [[*case.seconds] for case in record.cases] == [[OURS]] * 3
    assert record.absent["transformers"] == "transformers is not installed (pip install 'polyformer[peers]')"
    (record,) = models.run_models(dataclasses.replace(SMALL, models=("longformer",))).records
    assert (record.cases, record.absent) == ((), {"transformers": "not installed (transformers)"})


SMALL = models.ModelsBench(
    **{"length": 40, "layers": 2, "hidden_size": 12, "heads": 3, "vocab_size": 30},
    **{"window": 4, "marked": 2, "block": 2, "random": 2, "repeats": 1},
    dtype="float64",
)


@pytest.mark.parametrize("kind", models.PAIRS)
def test_whole_models_compute_the_same(kind: str) -> None:
    pytest.importorskip("transformers")
    pair, inputs = models.PAIRS[kind](SMALL)
    if kind == "longformer":  # its softmax is in float32
        pair = dataclasses.replace(pair, ours=pair.ours.float(), theirs=pair.theirs.float())
    assert agreement(pair, inputs, models.HIDDEN)["agrees"] == 1
    other, _ = models.PAIRS[kind](dataclasses.replace(SMALL, heads=1))
    ours = other.ours.to(next(pair.theirs.parameters()).dtype)
    assert agreement(dataclasses.replace(pair, ours=ours), inputs, models.HIDDEN)["agrees"] < 0.5


def test_whole_models_are_measured() -> None:
    pytest.importorskip("transformers")
    cases = cases_of(models.run_models(dataclasses.replace(SMALL, dtype="float32")))
    assert [*cases] == [
        f"{kind} {name}" for kind in models.PAIRS for name in ("forward", "forward and backward")
    ]
    for kind in models.PAIRS:
        assert cases[f"{kind} forward"].seconds.keys() == BOTH
        assert cases[f"{kind} forward"].facts["transformers"]["agrees"] == 1


def test_every_search_is_timed_and_the_index_finds_most(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    sizes = {"entries": 10_000, "width": 16, "batch": 3, "neighbours": 10, "centres": 50, "rank": 4}
    bench = neighbours.NeighboursBench(**sizes, repeats=1, folder=str(tmp_path / "store"))
    (case,) = cases_of(neighbours.run_neighbours(bench)).values()
    assert case.seconds.keys() >= {"read", OURS, "IVF-PQ"}
    assert case.facts["IVF-PQ"]["recall"] > 0.5
    assert case.facts["read"]["GB of keys/s"] > 0
    assert case.share(OURS) > 0
    with pytest.raises(InputError, match="milvus: expected"):
        neighbours.in_milvus("somewhere", open_folder(tmp_path / "store"))


def test_a_store_of_a_memorizing_transformer() -> None:
    sizes = {"entries": 200, "queries": 8, "width": 8, "neighbours": 4, "centres": 10, "rank": 2}
    cases = cases_of(neighbours.run_store(neighbours.StoreBench(**sizes, repeats=1)))
    assert {f"{OURS}-plain", f"{OURS}-tiled"} <= cases["store look up"].seconds.keys()
    assert OURS in cases["store store"].seconds


def test_tiny_models_of_three_libraries_write_the_same_tokens() -> None:
    pytest.importorskip("transformers")
    sizes = {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": 30, "length": 5, "new_tokens": 3}
    cases = cases_of(overhead.run(overhead.OverheadBench(**sizes, repeats=1)))
    models, attention = {*BOTH, "plain PyTorch"}, {OURS, "torch"}
    assert {name: case.seconds.keys() for name, case in cases.items()} == {
        **{f"tiny-{what}": models for what in ("forward", "generation", "step")},
        **{f"attend-{stated}": attention for stated in ("text", "object", "function")},
    }
    facts = cases["tiny-generation"].facts
    assert [facts[name]["same tokens"] for name in ("plain PyTorch", "transformers")] == [1, 1]


def test_the_plain_decoder_has_the_loss_and_the_gradients_of_ours() -> None:
    ours = polyformer.create_model(
        "gpt2", num_hidden_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=30, dropout=0.0
    ).double()
    plain = plain_decoder(ours.config, ours.state_dict()).double()
    ids = torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))
    losses = ours(ids, labels=ids).loss, plain.loss(ids)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(plain.tokens.weight.grad, ours.tokens.weight.grad)
