"""Heads over the vocabulary: logits, loss, smoothing in training only, tied and untied tables."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.nn.heads import Head, HeadConfig, HeadInput, HeadShape, LanguageModelConfig, MaskedConfig

VOCAB, WIDTH = 7, 4


def build(config: HeadConfig, tied: bool = True) -> Head:
    torch.manual_seed(0)
    head = config.build(HeadShape(hidden_size=WIDTH, vocab_size=VOCAB, tied=tied)).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def inputs() -> tuple[HeadInput, Tensor]:
    torch.manual_seed(1)
    hidden, table = torch.randn(2, 5, WIDTH).double(), torch.randn(VOCAB, WIDTH).double()
    return HeadInput(hidden, None, table), torch.tensor([[0, 1, -100, 6, 2], [-100, 3, 3, 5, 0]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_language_model(training: bool, tied: bool):
    head = build(LanguageModelConfig(label_smoothing=0.2, bias=True), tied).train(training)
    batch, labels = inputs()
    loss, predictions = head(batch, labels)
    weight = batch.table if tied else head.weight
    logits = batch.hidden @ weight.T + head.bias
    torch.testing.assert_close(predictions(), logits, rtol=1e-12, atol=1e-12)
    expected = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2 if training else 0.0
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    assert head.predicts_next


def test_masked_language_model():
    head = build(MaskedConfig(eps=0.1))
    batch, labels = inputs()
    loss, predictions = head(batch, labels)
    hidden = F.gelu(batch.hidden @ head.dense.weight.T + head.dense.bias)
    hidden = F.layer_norm(hidden, (WIDTH,), head.norm.weight, head.norm.bias, 0.1)
    logits = hidden @ batch.table.T + head.bias
    torch.testing.assert_close(predictions(), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()), rtol=1e-12, atol=1e-12
    )
    assert not head.predicts_next


def test_a_tied_head_has_no_table_of_its_own():
    assert [name for name, _ in build(LanguageModelConfig()).named_parameters()] == []
    assert [name for name, _ in build(LanguageModelConfig(), tied=False).named_parameters()] == ["weight"]


def test_without_labels_there_is_no_loss():
    assert build(LanguageModelConfig())(inputs()[0], None)[0] is None


def test_what_is_wrong_is_named():
    with pytest.raises(InputError, match=r"label_smoothing: expected a probability in \[0, 1\), got 1.0"):
        LanguageModelConfig(label_smoothing=1.0)
    with pytest.raises(InputError, match="unknown activation 'gelo': did you mean 'gelu'"):
        MaskedConfig(activation="gelo")


def test_a_frozen_bias_is_added_and_never_trained():
    head = build(LanguageModelConfig(bias=True, frozen_bias=True))
    assert [name for name, _ in head.named_parameters()] == []
    assert list(head.state_dict()) == ["bias"]
    head.bias.copy_(torch.arange(VOCAB))
    batch, labels = inputs()
    batch.hidden.requires_grad_()
    loss, predictions = head(batch, labels)
    logits = batch.hidden @ batch.table.T + torch.arange(VOCAB)
    torch.testing.assert_close(predictions(), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()), rtol=1e-12, atol=1e-12
    )
    loss.backward()
    assert head.bias.grad is None
