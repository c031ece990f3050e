"""Batches without a row and texts without a token: taken as they are, or refused by an `InputError`."""

import itertools
from typing import Any

import pytest
import torch
from members import Case
from selection import DECODING, cases, mechanisms

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.patterns.between_sequences import is_between_sequences
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package
from polyformer.core.sequence.context import Context
from polyformer.nn.stack import AttentionConfig

EMPTY = (0, 7), (2, 0), (0, 0)
"""Rows and tokens."""
POOLING_HEADS = {
    "choose",
    "classify",
    "classify_image",
    "distilled",
    "embed",
    "embed_attended",
    "embed_image",
    "embed_projected",
    "pretraining",
}
"""The heads that refuse texts without a token: they make one vector of the tokens of a text."""


@pytest.mark.parametrize(("name", "config"), mechanisms("mechanism"))
def test_mechanisms_take_calls_without_a_row_or_a_token(name: str, config: MechanismConfig):
    for form, (rows, length) in itertools.product((config, config.definition()), EMPTY):
        for causal in (False, True) if config.causal else (False,):
            for padding in (None, torch.ones(rows, length, dtype=torch.bool)):
                q, k, v = (torch.randn(rows, 2, length, 4, requires_grad=True) for _ in range(3))
                context = Context(length, length, causal=causal, kv_valid=padding)
                y, _ = form.build(2, 4).train()(q, k, v, context, None, None)
                assert y.shape == (rows, 2, length, 4)
                y.sum().backward()
                for x in (q, k, v):  # zeros, as torch gives them, and not None
                    assert x.grad is not None
                    assert not x.grad.any()


ONE_SEQUENCE = [
    (name, config)
    for name, config in mechanisms("mechanism", "causal", "supports_kv_cache")
    if not is_between_sequences(config)  # a decoder refuses it, because it reads the length of a source
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "config"), ONE_SEQUENCE)
def test_a_step_without_a_token_changes_no_state(name: str, config: MechanismConfig):
    for form in (config, config.definition()):
        torch.manual_seed(17)
        mechanism = form.build(2, 4).double().eval()
        inputs = [torch.randn(2, 2, 6, 4, dtype=torch.float64) for _ in range(3)]
        expected, _ = mechanism(*inputs, Context(6, 6, causal=True), None, None)
        state, outputs, past = mechanism.new_state(0), [], 0
        for new in (0, 4, 0, 2):
            part = [tensor[:, :, past : past + new] for tensor in inputs]
            past += new
            y, state = mechanism(*part, Context(new, past, causal=True), state, None)
            outputs.append(y)
        torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=1e-10, atol=1e-10)


def pools(case: Case) -> bool:
    return case.config.head.kind in POOLING_HEADS


def takes_empty_texts(case: Case) -> bool:
    """Of the heads of installed packages it is not known."""
    return not pools(case) and in_package(type(case.config.head))


def empty_batches(case: Case, rows: int, length: int) -> list[dict[str, torch.Tensor]]:
    """A batch of `rows` texts of `length` tokens, without a mask and with one."""
    batch = case.labels(case.batch())
    if not length:  # labels of texts, or of spans, have no axis of tokens
        batch = {name: tensor for name, tensor in batch.items() if "label" not in name}
    batch = {name: cut(tensor, rows, length) for name, tensor in batch.items()}
    mask = torch.ones(batch["input_ids"].shape, dtype=torch.long)
    return [batch, {**batch, "attention_mask": mask}]


@pytest.mark.parametrize("case", cases("empty batch"), ids=str)
def test_models_take_batches_without_a_row_or_a_token(case: Case):
    model = case.model(torch.float32)
    for training, (rows, length) in itertools.product((False, True), EMPTY):
        if not length and not takes_empty_texts(case):
            continue
        model.train(training)
        for batch in empty_batches(case, rows, length):
            output = model(**batch)
            output.last_hidden_state.sum().backward()
            assert len(output.last_hidden_state) == len(output.logits) == rows


POOLING = [case for case in cases("empty batch") if pools(case)]


@pytest.mark.parametrize("case", POOLING, ids=str)
def test_heads_that_pool_refuse_texts_without_a_token(case: Case):
    model = case.model(torch.float32)
    for training, rows in itertools.product((False, True), (2, 0)):
        model.train(training)
        for batch in empty_batches(case, rows, 0):
            with pytest.raises(InputError, match="pooling needs at least 1 token per text, got none"):
                model(**batch)


def test_every_head_that_pools_has_a_case():
    assert {case.config.head.kind for case in POOLING} == POOLING_HEADS


def cut(tensor: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """The first rows, and the first tokens on all axes of tokens: labels of texts have none."""
    axes = [min(size, length) if axis else rows for axis, size in enumerate(tensor.shape)]
    return tensor[tuple(slice(size) for size in axes)]


@torch.no_grad()
@pytest.mark.parametrize(
    "case", cases("empty decoding", "causal", "supports_kv_cache", shape=DECODING), ids=str
)
def test_decoding_takes_batches_without_a_row(case: Case):
    model, batch = case.model(torch.float32), case.batch()
    batch = {name: tensor[:0] for name, tensor in batch.items()}
    output = model(**batch, use_cache=True)
    name = "decoder_input_ids" if case.shape == "pair" else "input_ids"
    again = model(**{name: batch[name][:, :1]}, state=output.state)
    assert again.last_hidden_state.shape[:2] == (0, 1)


@pytest.mark.parametrize(("name", "config"), mechanisms("refusal"))
def test_heads_without_width_are_refused(name: str, config: MechanismConfig):
    x = torch.randn(1, 2, 5, 0)
    with pytest.raises(InputError, match="a width of 1 or more"):
        config.build(2, 0)(x, x, x, Context(5, 5), None, None)


def test_heads_without_width_are_refused_where_they_are_asked_for():
    with pytest.raises(InputError, match="head_size: expected 1 or more, got 0"):
        AttentionConfig(head_size=0)


@pytest.mark.parametrize(("rows", "queries"), [(0, 5), (2, 0)])
def test_keys_without_a_query_have_gradients_of_zeros(rows: int, queries: int):
    q = torch.randn(rows, 2, queries, 4, requires_grad=True)
    k, v = (torch.randn(rows, 2, 7, 4, requires_grad=True) for _ in range(2))
    for backend in ("auto", "tiled", "definition"):
        gradients = torch.autograd.grad(attend(q, k, v, backend=backend).sum(), (q, k, v))
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
        assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 2, 0, 4), (2, 2, 3, 4)])
def test_attention_of_nothing_is_nothing(shape: tuple[int, ...]):
    """Also where a score function reads tables that have no rows, and where there are queries but no keys."""
    table = torch.randn(shape[0], shape[2], requires_grad=True)
    q = torch.randn(shape, requires_grad=True)
    k = q[:, :, :0]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[b, i]

    for backend in ("auto", "tiled", "definition"):
        y, lse = attend(q, k, k, score_mod=score_mod, backend=backend, return_lse=True)
        assert y.shape == shape
        assert lse.shape == shape[:3]
        assert not y.any()
        y.sum().backward()
