"""Facts in segments, and questions about the own or another segment."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from polyformer.attention.patterns import ETC
from polyformer_lab.measures.strings import drawn, facts_encoder

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
