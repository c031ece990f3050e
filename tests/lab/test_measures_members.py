"""The table of members: all of them in it, questions and their answers, the verdict."""

import dataclasses
from pathlib import Path

import pytest
import torch

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.positions import PositionConfig
from polyformer.nn.depth import DepthConfig
from polyformer.nn.memory import MemoryConfig
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.members import compared, judged, members
from polyformer_lab.members.listing import (
    ABSENT,
    CONTROL,
    DENSE,
    OPTIONS,
    Family,
    Row,
    every_row,
)
from polyformer_lab.members.trial import (
    BACK,
    DISTANCE,
    HIDDEN,
    KINDS,
    LEVELS,
    VOCABULARY,
    Budget,
    Rows,
    Side,
    as_rows,
    backward,
    logits_of,
    model,
    questions,
    refusal,
    train,
)
from polyformer_lab.study import Study
from registered import registered

TINY = Budget(2, 2, 64, 2, 16, 2, 1e-3, 1, 2)
TEXT = torch.randint(HIDDEN, (4000,), generator=torch.Generator().manual_seed(3))
REFUSED = {
    "decoder": ("linformer", "sort_cut", "svd", "BlockDiffusion", "GlobalEnd", "Prefix", "Whole"),
    "encoder": ("exits",),
}
"""What sees later tokens, and what is for decoders alone."""


def asked(side: Side, length: int = 64, rows: int = 3, text: torch.Tensor = TEXT) -> Rows:
    return questions(text, rows, length, side, torch.Generator().manual_seed(0))


def test_every_member_has_a_row_or_a_reason():
    named = " ".join(row.expression for row in every_row())
    families = MechanismConfig, PositionConfig, MemoryConfig, DepthConfig
    kinds = {cls.__name__ for cls in registered(Pattern.registry)}
    kinds |= {member.kind for family in families for member in registered(family.kinds)}
    same = {"Full", "rope", "fixed"}  # parts of the row `softmax`
    assert not {kind for kind in kinds if kind not in named} - set(ABSENT) - same
    assert {kind for chosen in OPTIONS.values() for kind in chosen} | set(ABSENT) <= kinds


def test_every_row_is_a_cell_after_those_that_it_is_compared_with(tmp_path: Path):
    study = Study.load("members")
    cells = cells_of(study, tmp_path, Sources(study.needs, None, {}))
    assert len({cell.folder for cell in cells}) == len(cells) == len(every_row())
    needs = {cell.labels[0]: {other.labels[0] for other in cell.needs} for cell in cells}
    dense, control = "decoder mechanism softmax", "decoder pattern Window 8"
    assert needs["decoder depth act"] == {dense, control}
    assert (needs[dense], needs[control]) == ({control}, set())
    assert needs["decoder memory memorizing length= quarter store= n neighbours=16"] == {
        "decoder position transformer_xl",
        "decoder memory none",
    }
    assert [*members(["decoder depth act"])] == ["decoder depth act", control, dense]


def test_a_row_is_refused_only_where_its_member_cannot_be_used():
    rows = {side: asked(side, rows=1) for side in ("decoder", "encoder")}
    image = as_rows(torch.zeros(1, 196, dtype=torch.long))
    for row in every_row():
        if row.table == "image":
            reason = refusal(row, dataclasses.replace(TINY, length=196), image, LEVELS)
        else:
            reason = refusal(row, TINY, rows[row.table], VOCABULARY)
        expected = any(name in row.expression for name in REFUSED.get(row.table, ()))
        assert (reason is not None) == expected, f"{row.name}: {reason}"


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
    assert min(counts["back"], counts["text"]) > 8


@pytest.mark.parametrize(("side", "ahead"), [("decoder", 2), ("encoder", 1)])
def test_a_decoder_is_asked_for_the_next_character_and_an_encoder_for_a_hidden_one(side: Side, ahead: int):
    rows = asked(side, rows=4, text=torch.arange(600) % HIDDEN)
    ids = rows.inputs["input_ids"]
    for b, t in ((rows.kind == KINDS.index("text")) & (rows.answers != -100)).nonzero().tolist():
        if t and ids[b, t - 1] != HIDDEN:
            assert rows.answers[b, t] == (ids[b, t - 1] + ahead) % HIDDEN
    assert as_rows(torch.tensor([[1, 2, 3]])).answers.tolist() == [[2, 3, -100]]


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
    row = Row(side, family, expression)
    built = model(row, dataclasses.replace(TINY, length=128), 128, VOCABULARY).double().eval()
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
    rows, row = asked("decoder"), Row("decoder", "memory", "recurrent(length={n})")
    torch.manual_seed(0)
    built = model(row, TINY, 64, VOCABULARY)
    backward(built, row, rows)
    grads = [p.grad for p in built.parameters() if p.grad is not None]
    assert grads
    assert all(torch.isfinite(grad).all() for grad in grads)
    silent = dataclasses.replace(rows, answers=rows.answers.clone().fill_(-100))
    silent.answers[:, -1] = 1  # only the last segment asks
    backward(built, row, silent)


def test_training_repeats_exactly_and_leaves_the_callers_random_state():
    batches, state = [asked("encoder"), asked("encoder")], torch.get_rng_state()
    row = Row("encoder", "mechanism", "performer(features=64)")
    scores = [train(row, TINY, batches, asked("encoder"), VOCABULARY, seed) for seed in (0, 0, 1)]
    assert torch.equal(state, torch.get_rng_state())
    assert scores[0].nats == scores[1].nats != scores[2].nats


def test_a_row_is_judged_between_dense_and_control():
    verdicts = {
        "as dense": [0.9, 1.2, 1.0],
        "better than dense": [1.1, 1.3, 1.2],
        "as the control": [0.1, -0.3, 0.0],
        "worse than the control": [-0.1, -0.3],
        "between": [0.89, 1.0, 1.0],
    }
    assert {verdict: judged(shares) for verdict, shares in verdicts.items()} == {v: v for v in verdicts}
    assert judged([0.0, 1.0]) == judged([0.11, 0.0]) == "between"
    assert compared([1.0], [0.5], [2.5], 0.5) == {"least": 0.75, "most": 0.75, "verdict": "between"}
    assert compared([1.0], [0.5], [0.9], 0.5) == {"verdict": "no verdict: dense is as the control"}
    assert compared([0.5, 1.5], None, [2.0], 0.5)["verdict"] == "between"
    assert compared([2.5], None, None, 0.5) == {"verdict": "the control"}
