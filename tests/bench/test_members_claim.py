"""The table of members: all of them in it, questions and their answers, the verdict, a small run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer import InputError
from polyformer.attention.base import MechanismConfig
from polyformer.bench.reproduce.members import MembersClaim, cost, run
from polyformer.bench.reproduce.members.listing import ABSENT, CONTROL, DENSE, OPTIONS, Family, Row, every_row
from polyformer.bench.reproduce.members.pictures import LEVELS, as_rows
from polyformer.bench.reproduce.members.questions import (
    BACK,
    DISTANCE,
    HIDDEN,
    KINDS,
    LETTERS,
    VOCABULARY,
    Rows,
    Side,
    questions,
)
from polyformer.bench.reproduce.members.trial import Budget, backward, logits_of, model, refusal, train
from polyformer.bench.reproduce.members.verdict import judged, line, references
from polyformer.depth import DepthConfig
from polyformer.memory import MemoryConfig
from polyformer.patterns.base import Pattern
from polyformer.position import PositionConfig
from registered import registered

TINY = Budget(steps=2, rows=2, length=64, layers=2, width=16, heads=2, lr=1e-3, warmup=1)
ROWS = [row for row in every_row() if row.table != "image"]
TEXT = torch.randint(HIDDEN, (4000,), generator=torch.Generator().manual_seed(3))
REFUSED = {
    "decoder": ("linformer", "sort_cut", "svd", "GlobalEnd", "Whole"),
    "encoder": ("exits",),
}
"""What sees later tokens, and what is for decoders alone."""


def asked(side: Side, length: int = 64, rows: int = 3) -> Rows:
    return questions(TEXT, rows, length, side, torch.Generator().manual_seed(0))


def test_every_member_has_a_row_or_a_reason():
    named = " ".join(row.expression for row in every_row())
    families = MechanismConfig, PositionConfig, MemoryConfig, DepthConfig
    kinds = {cls.__name__ for cls in registered(Pattern.registry)}
    kinds |= {member.kind for family in families for member in registered(family.kinds)}
    same = {"Full", "rope", "fixed"}  # parts of the row `softmax`
    missing = {kind for kind in kinds if kind not in named} - set(ABSENT) - same
    assert not missing
    assert {kind for chosen in OPTIONS.values() for kind in chosen} | set(ABSENT) <= kinds
    assert len({row.name for row in every_row()}) == len(every_row())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_refused_only_where_its_member_cannot_stand(row: Row):
    expected = any(name in row.expression for name in REFUSED[row.table])
    reason = refusal(row, TINY, asked(row.table, rows=1), VOCABULARY)  # type: ignore[arg-type]
    assert (reason is not None) == expected, reason


@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_the_answers_are_right_far_away_and_not_shown(side: Side):
    rows = asked(side, length=128)
    ids, types = rows.inputs["input_ids"], rows.inputs["token_type_ids"]
    counts = dict.fromkeys(KINDS, 0)
    for b, t in (rows.answers != -100).nonzero().tolist():
        kind, answer = KINDS[rows.kind[b, t]], rows.answers[b, t]
        counts[kind] += 1
        if kind == "text":
            assert types[b, t] == 0
            assert (ids[b, t] == HIDDEN) == (side == "encoder")
            continue
        assert ids[b, t] == HIDDEN
        if kind == "back":
            assert types[b, t] == BACK
            assert ids[b, t - DISTANCE] == answer
        else:
            (place,) = (types[b, :64] == types[b, t]).nonzero().flatten().tolist()
            assert ids[b, place] == answer
            assert t - place > 128 // 4
    assert counts["recall"] == 3 * 16
    assert counts["back"] > 8
    assert counts["text"] > 8


def test_a_decoder_is_asked_for_the_next_character_and_an_encoder_for_a_hidden_one():
    sides: tuple[Side, Side] = ("decoder", "encoder")
    text = torch.arange(600) % HIDDEN
    for side in sides:
        rows = questions(text, 4, 64, side, torch.Generator().manual_seed(0))
        ids = rows.inputs["input_ids"]
        for b, t in ((rows.kind == KINDS.index("text")) & (rows.answers != -100)).nonzero().tolist():
            if t and ids[b, t - 1] != HIDDEN:
                ahead = 2 if side == "decoder" else 1
                assert rows.answers[b, t] == (ids[b, t - 1] + ahead) % HIDDEN


@pytest.mark.parametrize(
    ("side", "family", "expression", "sees"),
    [
        ("decoder", "mechanism", DENSE, True),
        ("encoder", "mechanism", DENSE, True),
        ("decoder", "pattern", CONTROL, False),
        ("encoder", "pattern", CONTROL, False),
        ("decoder", "memory", "recurrent(length={n})", True),
        ("decoder", "memory", "none", False),
    ],
)
def test_the_control_cannot_see_what_it_is_asked_for(side: Side, family: Family, expression: str, sees: bool):
    torch.manual_seed(0)
    budget = dataclasses.replace(TINY, length=128)
    row = Row(side, family, expression)
    built = model(row, budget, 128, VOCABULARY).double().eval()
    rows = asked(side, length=128)
    other = dict(rows.inputs)
    first = torch.arange(128) < 32
    other["input_ids"] = torch.where(first, (other["input_ids"] + 1) % HIDDEN, other["input_ids"])
    with torch.no_grad():
        logits = [
            logits_of(built, row, dataclasses.replace(rows, inputs=inputs))[:, 64:]
            for inputs in (rows.inputs, other)
        ]
    assert (logits[0] - logits[1]).abs().max().item() > 1e-6 if sees else torch.equal(*logits)


def test_a_memory_of_all_segments_gets_the_gradients_of_its_questions():
    rows = asked("decoder")
    torch.manual_seed(0)
    row = Row("decoder", "memory", "recurrent(length={n})")
    built = model(row, TINY, 64, VOCABULARY)
    backward(built, row, rows)
    grads = [p.grad for p in built.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)
    silent = dataclasses.replace(rows, answers=rows.answers.clone().fill_(-100))
    silent.answers[:, -1] = 1  # only the last segment asks
    backward(built, row, silent)


def test_training_repeats_exactly_and_leaves_the_callers_random_state():
    batches = [asked("encoder"), asked("encoder")]
    state = torch.get_rng_state()
    row = Row("encoder", "mechanism", "performer(features=64)")
    scores = [train(row, TINY, batches, asked("encoder"), VOCABULARY, seed) for seed in (0, 0, 1)]
    assert torch.equal(state, torch.get_rng_state())
    assert scores[0].nats == scores[1].nats != scores[2].nats
    assert set(scores[0].right) == set(KINDS)


def test_a_pixel_asks_for_the_next():
    rows = as_rows(torch.tensor([[1, 2, 3]]))
    assert rows.answers.tolist() == [[2, 3, -100]]
    row = Row("image", "pattern", "Local2D([{side}, {side}], [2, 7], [3, 3, 3])")
    image = as_rows(torch.zeros(1, 196, dtype=torch.long))
    assert refusal(row, dataclasses.replace(TINY, length=196), image, LEVELS) is None


@pytest.mark.parametrize(
    ("closed", "verdict"),
    [
        ([0.9, 1.2, 1.0], "as dense"),
        ([1.1, 1.3, 1.2], "better than dense"),
        ([0.1, -0.3, 0.0], "as the control"),
        ([-0.1, -0.3], "worse than the control"),
        ([0.89, 1.0, 1.0], "between"),
        ([0.0, 1.0], "between"),
        ([0.11, 0.0], "between"),
    ],
)
def test_the_rule_of_the_verdict(closed: list[float], verdict: str):
    assert judged(closed) == verdict


def figures(**nats: float) -> dict[str, dict[str, Any]]:
    return {
        name: {str(seed): {"nats": {"recall": value}, "right": {"recall": 0.5}, "milliseconds": 9.0}}
        for name, value in nats.items()
        for seed in (0,)
    }


def test_a_row_stands_between_dense_and_control():
    row = Row("decoder", "mechanism", "lsh")
    dense, control = references(row)
    some = {dense.name: 0.5, control.name: 2.5, row.name: 1.0}
    result = line(row, "lsh", figures(**some), 1.5, None)
    assert result.closed == (0.75, 0.75)
    assert result.verdict == "between"
    assert line(row, "lsh", figures(**{row.name: 1.0}), None, None).verdict.startswith(
        "no verdict: dense and"
    )
    near = line(row, "lsh", figures(**{**some, control.name: 0.9}), None, None)
    assert near.verdict == "no verdict: dense is as the control"


def test_positions_memories_and_images_have_references_of_their_own():
    assert references(Row("decoder", "position", "t5"))[1].expression == "none"
    assert references(Row("decoder", "memory", "recurrent"))[0].expression == "transformer_xl"
    assert references(Row("image", "position", "none"))[1].expression == "Window(2, 0)"
    every = set(every_row())
    assert all(set(references(row)) <= every for row in every_row())


def test_a_small_run_is_kept_and_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    book = tmp_path / "book.txt"
    book.write_text("A line of text, of which there are many.\n" * 2000)
    settings = {"data": str(book), "out": str(tmp_path / "out"), "length": 64, "held_out": 4, "width": 16}
    config = MembersClaim.from_dict({**settings, "quick": True, "members": ["decoder memory none", "svd"]})
    (only,) = (each for each in run(config) if each.row.table == "decoder")
    assert only.verdict == "no verdict: dense and the control are missing"
    text = (tmp_path / "out" / "members.md").read_text()
    assert "| memory `none` |" in text
    assert "- `decoder svd(rank=32)`: mechanism 'svd' cannot run in a decoder" in text
    kept = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert set(kept["scores"]) == {"decoder memory none", "encoder mechanism svd(rank=32)"}
    capsys.readouterr()
    monkeypatch.setattr(cost, "slope", None)
    run(config)
    assert ", seed 0:" not in capsys.readouterr().out, "nothing is trained twice"
    with pytest.raises(InputError, match="holds figures of other settings; choose another place with --out"):
        run(dataclasses.replace(config, lr=1e-4))
    with pytest.raises(InputError, match="members: no row has any of absent in its name"):
        run(dataclasses.replace(config, members=("absent",)))


def test_what_settings_must_be():
    with pytest.raises(InputError, match="parts: expected quality or cost, got 'speed'"):
        MembersClaim(parts=("speed",))
    with pytest.raises(InputError, match="seeds: expected one or more"):
        MembersClaim(seeds=())
    with pytest.raises(InputError, match="length"):
        MembersClaim(length=8)
    assert len(LETTERS) == HIDDEN
