"""Speculative decoding: whatever is proposed, every member writes what greedy search writes."""

import dataclasses
from typing import Any

import pytest
import torch
from members import VOCAB, Case, assert_same
from selection import predicting
from shared_models import shared
from torch import Tensor

from polyformer.core.state import State
from polyformer.models.architectures import Transformer
from polyformer.models.generation import Drafts, Generated

WRITTEN = 16


@dataclasses.dataclass(frozen=True)
class Rows(State):
    """Which texts they are."""

    numbers: Tensor


@dataclasses.dataclass
class Prompter:
    """Knows the texts [N, L] that follow `width` tokens; now and then it proposes a wrong token."""

    texts: Tensor
    width: int

    def start(self, input_ids: Tensor, *_: object) -> Rows:
        return Rows(torch.arange(len(input_ids)))

    def propose(self, text: Tensor, count: int, memory: Rows) -> tuple[Drafts, Rows]:
        begin = text.shape[1] - self.width
        places = torch.arange(begin, min(begin + count, self.texts.shape[1]))
        right = self.texts[memory.numbers][:, places]
        wrong = (places * (3 + memory.numbers.unsqueeze(1)) + memory.numbers.unsqueeze(1)) % 7 == 5
        return Drafts(torch.where(wrong, (right + 1) % VOCAB, right)), memory


def prompt(case: Case) -> tuple[Tensor, Tensor]:
    """Two prompts, one of them padded on the left."""
    ids = case.batch()["input_ids"][:, :5]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return ids, mask


def write(model: Transformer, ids: Tensor, mask: Tensor | None, **settings: Any) -> Generated:
    return model.generate(ids, mask, max_new_tokens=WRITTEN, start=1, eos=(), **settings)


@pytest.mark.parametrize("case", predicting("speculation"), ids=str)
def test_a_draft_changes_no_token(case: Case):
    """Of a padded batch, and of its rows alone; drafts are accepted and refused."""
    model, (ids, mask) = shared(case), prompt(case)
    plain = write(model, ids, mask)
    width = ids.shape[1] if case.shape == "decoder" else 1
    texts = plain.sequences[:, plain.prompt_length :]
    for rows in (slice(0, 2), slice(1, 2)):
        prompter = Prompter(texts[rows], width)
        drafted = write(model, ids[rows], mask[rows], draft=prompter, draft_tokens=4)
        assert torch.equal(drafted.sequences, plain.sequences[rows])
        assert_same(drafted.scores, plain.scores[rows])
        counts = drafted.drafted
        assert counts is not None
        assert 0 < counts.accepted < counts.proposed
        assert counts.passes < WRITTEN - 1
