"""Generated tasks with a structure: strings, and segments with questions."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from polyformer.attention.patterns import ETC
from polyformer.core.sequence.tokens import Tokens
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.strings import Reviews, drawn, facts_encoder, writer_of
from polyformer_lab.study import Study


def test_the_models_are_equal_in_what_their_names_say(tmp_path: Path):
    cells = cells_of(Study.load("universal"), tmp_path, Sources({}, None, {}))[:4]
    universal, narrow, wide, placed = (
        sum(p.numel() for p in writer_of(cell.options["model"]).parameters()) for cell in cells
    )
    assert abs(narrow / universal - 1) < 0.05
    assert wide == placed > 3 * universal


def test_source_and_target_begin_at_the_given_position():
    torch.manual_seed(0)
    options = {
        "preset": "transformer-tiny",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
    }
    model = writer_of({**options, "position": "sinusoidal", "label_smoothing": 0.0}).eval()
    ids = torch.randint(4, 14, (2, 5))
    at = [model(ids, ids, torch.tensor(start)).logits for start in (0, 7)]
    torch.testing.assert_close(at[0], model.model(ids, labels=ids).logits)
    target = model.model.shifted_right(ids, None)
    for source_from, target_from in ((0, 7), (7, 0), (7, 7)):
        state = model.model.encode(ids, position_ids=torch.arange(source_from, source_from + 5))
        state = dataclasses.replace(state, tokens=Tokens(0, dropped=target_from))
        logits = model.model(decoder_input_ids=target, state=state).logits
        assert torch.allclose(logits, at[1]) == (source_from == target_from)


SEGMENTS, LENGTH, VALUES = 4, 3, 5
KEYS = SEGMENTS * LENGTH
FACTS = {"segments": SEGMENTS, "length": LENGTH, "values": VALUES}


def row_of(place: Literal["own", "other"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the facts [R, S, L], the asked keys [R, S] and the answers [R, S]."""
    batch = drawn(50, torch.Generator().manual_seed(0), **FACTS, place=place)
    ids, labels = batch["input_ids"], batch["labels"]
    assert bool((labels[:, SEGMENTS:] == -100).all())
    assert batch["segment_ids"][0].tolist() == [0, 1, 2, 3, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert batch["token_type_ids"][0].tolist() == [0] * SEGMENTS + [1] * KEYS
    facts = ids[:, SEGMENTS:].view(-1, SEGMENTS, LENGTH)
    return facts, ids[:, :SEGMENTS] - KEYS * VALUES, labels[:, :SEGMENTS]


def test_own_answers_are_in_the_segment_and_other_segments_mislead():
    facts, keys, answers = row_of("own")
    asked = facts // VALUES == keys.unsqueeze(-1)  # the fact of each segment about the question of its own
    assert bool((asked.sum(-1) == 1).all())
    assert torch.equal((facts % VALUES)[asked].view(-1, SEGMENTS), answers)
    others = facts.roll(1, 1)
    misleading = others // VALUES == keys.unsqueeze(-1)
    assert bool((misleading.sum(-1) == 1).all())
    assert not torch.equal((others % VALUES)[misleading].view(-1, SEGMENTS), answers)


def test_other_answers_are_in_a_single_fact_of_another_segment():
    facts, keys, answers = row_of("other")
    assert not bool((facts // VALUES == keys.unsqueeze(-1)).any())
    asked = facts.view(-1, 1, KEYS) // VALUES == keys.unsqueeze(-1)
    assert bool((asked.sum(-1) == 1).all())
    values = (facts % VALUES).view(-1, 1, KEYS).expand(-1, SEGMENTS, -1)
    assert torch.equal(values[asked].view(-1, SEGMENTS), answers)


@pytest.mark.parametrize("hard", [False, True])
def test_a_hard_mask_hides_the_facts_of_other_segments(hard: bool):
    torch.manual_seed(0)
    model = {
        "preset": "etc-tiny",
        "num_hidden_layers": 1,
        "attention": ETC(SEGMENTS, 1, hard_g2l=hard),
        "position": f"etc_labels(global_tokens={SEGMENTS}, max_distance=2)",
    }
    encoder = facts_encoder(model, **FACTS, place="own").eval()
    batch = drawn(1, torch.Generator().manual_seed(0), **FACTS, place="own")
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, -1] = (changed["input_ids"][0, -1] + 1) % (KEYS * VALUES)
    first, second = (encoder(**each).logits[0, :SEGMENTS] for each in (batch, changed))
    assert torch.equal(first[0], second[0]) == hard
    assert not torch.equal(first[-1], second[-1])


def test_each_global_token_has_the_label_of_its_review():
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=60), ["ab ba", "b a"])
    reviews = Reviews([("ab", "1"), ("b a b", "0"), ("ba", "1")], tokenizer)
    batch = reviews.batch(torch.tensor([[0, 1], [2, 0]]))
    assert batch["labels"][:, :2].tolist() == [[1, 0], [1, 1]]
    assert bool((batch["labels"][:, 2:] == -100).all())
    for row, numbers in enumerate([[0, 1], [2, 0]]):
        for segment, number in enumerate(numbers):
            of = (batch["segment_ids"][row] == segment) & (batch["attention_mask"][row] == 1)
            ids = batch["input_ids"][row][of].tolist()
            assert ids == [tokenizer.cls_id, *reviews.ids[number]]
