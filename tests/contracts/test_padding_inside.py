"""K3 inside a text: padding between two tokens is no token, or the part that would count it is named."""

from typing import Any

import pytest
import torch
from members import Case, assert_same
from selection import SINGLE, cases
from shared_models import shared
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.core.sequence.tokens import Tokens
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.gaps import has_gaps

LENGTH = 14
GAPS = 4, 5, 6, 9


def stack_of(model: Transformer) -> Any:
    return model.encoder if model.decoder is None else model.decoder


def text(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """All that the model reads of two rows, and a mask with padding inside the first."""
    ids = case.batch(2, LENGTH)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, GAPS] = 0
    own = case.labels({"input_ids": ids})
    return {name: x for name, x in own.items() if "labels" not in name and name != "neighbour_ids"}, mask


def alone(inputs: dict[str, Tensor], seen: Tensor) -> dict[str, Tensor]:
    """The first row without its padding."""
    return {
        name: x[:1][:, seen][:, :, seen] if name == "relation_ids" else x[:1][:, seen]
        for name, x in inputs.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("case", cases("padding", shape=SINGLE), ids=str)
def test_padding_between_tokens_is_no_token_or_is_refused(case: Case):
    model, (inputs, mask) = shared(case), text(case)
    part, seen = stack_of(model).counts_slots, mask[0].bool()
    if part:
        with pytest.raises(InputError) as caught:
            model(**inputs, attention_mask=mask)
        assert str(caught.value).startswith(f"attention_mask: {part} counts the padding between the tokens")
        return
    expected = model(**alone(inputs, seen)).last_hidden_state[0]
    assert_same(model(**inputs, attention_mask=mask).last_hidden_state[0][seen], expected)


@torch.no_grad()
@pytest.mark.parametrize("case", cases("padding", "causal", "supports_kv_cache", shape=("decoder",)), ids=str)
def test_a_second_turn_after_padding(case: Case):
    """The first turn of one row ends in padding, and a state then goes on."""
    model, (inputs, _) = shared(case), text(case)
    if inputs.keys() != {"input_ids"}:
        return
    ids, mask = inputs["input_ids"], torch.ones(2, 6, dtype=torch.long)
    mask[0, 4:] = 0
    state = model(ids[:, :6], attention_mask=mask, use_cache=True).state
    if stack_of(model).counts_slots:
        with pytest.raises(InputError, match=r"^attention_mask: .* those in the state too$"):
            model(ids[:, 6:], state=state)
        return
    seen = torch.ones(LENGTH, dtype=torch.bool)
    seen[4:6] = False
    expected = model(ids[:1, seen]).last_hidden_state[0, 4:]
    for split in ([LENGTH - 6], [1, LENGTH - 7]):
        later, outputs = state, []
        for part in ids[:, 6:].split(split, 1):
            output = model(part, state=later)
            later = output.state
            outputs.append(output.last_hidden_state[0])
        assert_same(torch.cat(outputs), expected)


@pytest.mark.parametrize(
    ("valid", "doc", "gaps"),
    [
        ([0, 0, 1, 1, 1, 0], None, False),
        ([0, 1, 0, 1, 1, 0], None, True),
        ([0, 0, 0, 0, 0, 0], None, False),
        ([1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1], False),
        ([1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], True),
        ([1, 1, 0, 1, 0, 1], [0, 0, 0, 1, 1, 1], True),
    ],
)
def test_gaps_are_within_documents(valid: list[int], doc: list[int] | None, gaps: bool):
    rows = torch.tensor([[1] * 6, valid]).bool()
    numbers = None if doc is None else torch.tensor([[0] * 6, doc])
    assert has_gaps(Tokens(6, rows, doc=numbers)) == gaps


@pytest.mark.parametrize(
    "options",
    [{"position": "rope"}, {"position": "rope", "attention": "lsh"}, {"attention": "moba"}],
    ids=str,
)
def test_parts_without_slots_are_not_refused(options: dict[str, str]):
    ids = torch.ones(1, 5, dtype=torch.long)
    model = polyformer.create_model("decoder-tiny", **options).eval()
    assert model(ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1]])).logits.isfinite().all()
