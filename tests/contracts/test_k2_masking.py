"""K2 no future; K3 padding; K4 packed documents are as if alone."""

from typing import Any

import pytest
import torch
from members import VOCAB, Case, assert_same, gradients, score, weighted_sum
from selection import DECODING, SINGLE, cases, mechanisms
from shared_models import plain, shared
from torch import Tensor

from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.sequence.context import Context
from polyformer.models.outputs import ModelOutput


def read(case: Case) -> str:
    """The argument whose tokens stand on the causal side."""
    return "decoder_input_ids" if case.shape == "pair" else "input_ids"


def per_token(case: Case, output: ModelOutput) -> list[Tensor]:
    """What the model says of each token: hidden states, and predictions where there is one a token."""
    rows, length, _ = output.last_hidden_state.shape
    logits = output.logits
    says = case.config.head.kind != "span" and logits.shape[:2] == (rows, length) and logits.dim() == 3
    return [output.last_hidden_state, *([logits] if says else [])]


@pytest.mark.parametrize("case", cases("future", "causal", shape=DECODING), ids=str)
def test_the_future_is_not_seen(case: Case):
    model, batch, key, seen = shared(case), case.batch(), read(case), 4
    ids = batch[key]
    expected = per_token(case, plain(case)[0])
    changed = ids.clone()
    changed[:, seen:] = (changed[:, seen:] + 5) % VOCAB
    added = torch.cat([ids, ids.flip(1), ids], 1)
    for other in (changed, added, ids[:, :seen], ids[:, : seen + 1]):
        output = per_token(case, model(**{**batch, key: other}))
        for actual, wanted in zip(output, expected):
            torch.testing.assert_close(actual[:, :seen], wanted[:, :seen], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", cases("past", "causal", shape=DECODING), ids=str)
def test_gradients_come_from_the_past_alone(case: Case):
    model, batch, key, seen = shared(case), case.batch(rows=1), read(case), 4
    table = (
        model.decoder_tokens if model.decoder_tokens is not None and case.shape == "pair" else model.tokens
    )
    batch[key] = torch.arange(3, 3 + batch[key].shape[1]).unsqueeze(0)
    if case.shape == "pair":
        batch["input_ids"] = torch.zeros_like(batch["input_ids"])
    hidden = model(**batch).last_hidden_state
    tables = [table.weight] if isinstance(table, torch.nn.Embedding) else [own.weight for own in table.tables]
    slopes = torch.autograd.grad(hidden[:, :seen].square().sum(), tables)
    slope = torch.cat([own.abs().sum(1, keepdim=True) for own in slopes])
    assert slope[3 + seen :].abs().max() == 0
    assert slope[3 : 3 + seen].abs().min(0).values.max() > 0


SIDES = ((3, 0), (2, 5))
"""How many tokens of padding stand before and after a text."""


def padded(ids: Tensor, before: int, after: int, seed: int) -> tuple[Tensor, Tensor]:
    """ids [B, T] with random tokens on both sides, and the mask that says so."""
    torch.manual_seed(seed)
    rows = len(ids)
    around = torch.randint(VOCAB, (rows, before)), torch.randint(VOCAB, (rows, after))
    mask = torch.ones_like(ids)
    return (
        torch.cat([around[0], ids, around[1]], 1),
        torch.cat([mask.new_zeros(rows, before), mask, mask.new_zeros(rows, after)], 1),
    )


@pytest.mark.parametrize("case", cases("padding"), ids=str)
def test_padding_changes_nothing(case: Case):
    """Its content and its amount, on both sides at once: outputs, predictions and gradients stay."""
    model, batch = shared(case), case.batch()
    expected, slopes = plain(case)
    for seed, (before, after) in enumerate(SIDES, 6):
        ids, mask = padded(batch["input_ids"], before, after, seed)
        output = model(**{**batch, "input_ids": ids, "attention_mask": mask})
        if case.shape == "pair":
            assert_same(output.last_hidden_state, expected.last_hidden_state)
            assert_same(output.logits, expected.logits)
            assert_same(gradients(model, score(output)), slopes)
            continue
        real = slice(before, before + batch["input_ids"].shape[1])
        assert_same(output.last_hidden_state[:, real], expected.last_hidden_state)
        logits = output.logits[:, real] if output.logits.shape[1] == ids.shape[1] else output.logits
        assert_same(logits, expected.logits)
        assert_same(gradients(model, score(output, mask)), slopes)


@pytest.mark.parametrize("case", cases("target padding", "causal", shape=("pair",)), ids=str)
def test_padding_of_the_target_changes_nothing(case: Case):
    model, batch = shared(case), case.batch()
    expected = plain(case)[0].last_hidden_state
    for before, after in SIDES:
        ids, mask = padded(batch["decoder_input_ids"], before, after, seed=6)
        output = model(**{**batch, "decoder_input_ids": ids, "decoder_attention_mask": mask})
        assert_same(output.last_hidden_state[:, before : before + expected.shape[1]], expected)


@pytest.mark.parametrize("case", cases("lengths"), ids=str)
def test_rows_of_different_lengths_are_as_if_alone(case: Case):
    model, batch = shared(case), case.batch(rows=3)
    lengths = [11, 1, 6]
    mask = (torch.arange(11) < torch.tensor(lengths).unsqueeze(1)).long()
    together = model(**batch, attention_mask=mask).last_hidden_state
    for row, length in enumerate(lengths):
        row_alone = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        row_alone["input_ids"] = row_alone["input_ids"][:, :length]
        alone = model(**row_alone).last_hidden_state
        assert_same(together[row : row + 1, : alone.shape[1]], alone)


@pytest.mark.parametrize("case", cases("empty row"), ids=str)
def test_a_row_of_padding_alone_is_never_nan(case: Case):
    model, batch = shared(case), case.batch()
    mask = torch.ones_like(batch["input_ids"])
    mask[0] = 0
    output = model(**batch, attention_mask=mask)
    assert output.last_hidden_state.isfinite().all()
    assert not output.logits.isnan().any()
    for name, slope in gradients(model, score(output)).items():
        assert slope.isfinite().all(), name


@pytest.mark.parametrize(("name", "config"), mechanisms("mechanism"))
def test_queries_that_see_nothing_give_zeros(name: str, config: MechanismConfig):
    for causal in (False, True) if config.causal else (False,):
        torch.manual_seed(8)
        q, k, v = (torch.randn(2, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
        valid = torch.ones(2, 7, dtype=torch.bool)
        valid[0] = False
        context = Context(7, 7, causal=causal, kv_valid=valid)
        y, _ = config.build(2, 4).double().eval()(q, k, v, context, None, None)
        assert y[0].abs().max() == 0
        assert y[1].abs().max() > 0
        for slope in torch.autograd.grad(y.sum(), (q, k, v), allow_unused=True):
            if slope is not None:
                assert slope.isfinite().all()
                assert slope[0].abs().max() == 0


DOCUMENTS = [3, 1, 5, 2]


@pytest.mark.parametrize("case", cases("documents", "supports_packing", shape=SINGLE), ids=str)
def test_packed_documents_are_as_if_alone(case: Case):
    """Outputs and gradients, with padding too; the documents' numbers mean nothing but where one ends."""
    model, batch = shared(case), case.batch(length=sum(DOCUMENTS))
    ids = batch["input_ids"]
    numbers = torch.tensor([0, 2, 3, 9]).repeat_interleave(torch.tensor(DOCUMENTS)).expand_as(ids)
    output = model(**batch, document_ids=numbers)
    alone = [model(input_ids=part) for part in ids.split(DOCUMENTS, 1)]
    apart: Any = torch.cat([document.last_hidden_state for document in alone], 1)
    assert_same(output.last_hidden_state, apart)
    slopes = gradients(model, score(output))
    assert_same(slopes, gradients(model, weighted_sum(apart)))
    longer, mask = padded(ids, 2, 3, seed=6)
    numbers = numbers[
        :, [0, 0, *range(ids.shape[1]), -1, -1, -1]
    ]  # as of the documents that it stands next to
    padding = model(input_ids=longer, attention_mask=mask, document_ids=numbers)
    assert_same(padding.last_hidden_state[:, 2:-3], apart)
