"""Padding that is left out of the computation, and documents in calls of their own, change no number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend, explain
from polyformer.attention.functional.request import Call, prepare
from polyformer.attention.functional.splits import document_lengths
from polyformer.attention.patterns import Window
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.unpadding import unpadding
from polyformer.models.presets import model_config

LENGTHS = (70, 33, 1, 200)


def mask(side: str = "right", width: int = 200) -> Tensor:
    order, lengths = torch.arange(width), torch.tensor(LENGTHS).unsqueeze(1)
    return (order < lengths if side == "right" else order >= width - lengths).long()


@pytest.mark.parametrize("side", ["right", "left"])
def test_there_and_back(side: str):
    inputs = ModelInputs(torch.arange(800).view(4, 200), mask(side), torch.arange(200))
    padding = unpadding(inputs)
    assert padding is not None
    packed = padding.pack_inputs(inputs)
    assert packed.input_ids is not None
    assert packed.document_ids is not None
    assert packed.input_ids.shape == packed.document_ids.shape == (1, sum(LENGTHS))
    assert packed.attention_mask is None
    assert packed.document_ids[0].unique_consecutive(return_counts=True)[1].tolist() == list(LENGTHS)
    x = torch.randn(4, 200, 3)
    torch.testing.assert_close(padding.unpack(padding.pack(x)), x * mask(side).unsqueeze(-1), rtol=0, atol=0)


def test_documents_of_a_padded_row_stay_apart():
    documents = (torch.arange(200) >= 20).long().expand(4, -1)
    inputs = ModelInputs(torch.zeros(4, 200, dtype=torch.long), mask(), document_ids=documents)
    padding = unpadding(inputs)
    assert padding is not None
    packed = padding.pack_inputs(inputs).document_ids
    assert packed is not None
    assert bool((packed.diff() >= 0).all())
    assert packed[0].unique_consecutive(return_counts=True)[1].tolist() == [20, 50, 20, 13, 1, 20, 180]


@pytest.mark.parametrize("few", [torch.ones(4, 200), (torch.arange(200) < 199).long().expand(4, -1)])
def test_little_padding_stays(few: Tensor):
    assert unpadding(ModelInputs(torch.zeros(4, 200, dtype=torch.long), few)) is None


@pytest.mark.parametrize("preset", ["encoder-tiny", "decoder-tiny", "bert-base"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_without_its_padding_is_the_model(preset: str, side: str, monkeypatch):
    """Predictions at real tokens, the loss and all gradients, in float64."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 200,
        "dropout": 0.0,
    }
    torch.manual_seed(0)
    model = Transformer(model_config(preset, sizes)).double()
    ids, real = torch.randint(50, (4, 200)), mask(side)
    labels = model.config.head.example_labels(4, 200, 50)
    assert labels is not None
    if labels.dim() == 2:
        labels = labels.masked_fill(real == 0, -100)
    results = []
    for worth in (128, 10**9):
        monkeypatch.setattr("polyformer.models.architectures.unpadding.WORTH_TOKENS", worth)
        model.zero_grad()
        out = model(ids, attention_mask=real, labels=labels, output_hidden_states=True)
        out.loss.backward()
        logits = out.logits if out.logits.dim() == 2 else out.logits[real.bool()]
        hidden = [state[real.bool()] for state in out.hidden_states]
        results.append([logits, out.loss, *hidden, *(parameter.grad for parameter in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_in_calls_of_their_own(causal: bool):
    torch.manual_seed(0)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([40, 65, 100])).unsqueeze(0)
    context = Context(205, 205, causal=causal, q_doc=documents, kv_doc=documents)
    q, k, v = (torch.randn(1, 2, 205, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for sums in (False, True):
        results = []
        for backend in ("auto", "definition"):
            out, lse = attend(q, k, v, context=context, backend=backend, return_lse=True)
            value = (out.square().sum() + lse.sum()) if sums else out.square().sum()
            results.append([out, lse, *torch.autograd.grad(value, (q, k, v))])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert [leaf.request.context.q_len for leaf in explain(q, k, v, context=context).leaves] == [40, 65, 100]


def test_a_pattern_or_short_documents_stay_in_one_call():
    documents = torch.arange(64).div(4, rounding_mode="floor").unsqueeze(0)
    context = Context(64, 64, q_doc=documents, kv_doc=documents)
    q = torch.randn(1, 1, 64, 4)
    assert document_lengths(prepare(Call(q, q, q, context=context))) is None
    long = Context(64, 64, q_doc=documents // 8, kv_doc=documents // 8)
    for pattern, expected in ((None, [32, 32]), (Window(3), None)):
        assert document_lengths(prepare(Call(q, q, q, pattern=pattern, context=long))) == expected
