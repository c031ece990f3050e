"""What parts add to a loss: by name, in training alone, and once where activations are recomputed."""

import pytest
import torch

from polyformer.architecture import ModelConfig, SpecialTokens
from polyformer.attention import AdaptiveSpanConfig, DynamicSpanConfig
from polyformer.attention.base import MechanismConfig
from polyformer.core.auxiliary_losses import joined, penalize, penalties
from polyformer.model import Transformer
from polyformer.stack import AttentionConfig, StackConfig


def test_terms_of_one_name_add_up():
    penalize("lost", torch.tensor(9.0))
    with penalties() as outer:
        penalize("a", torch.tensor(1.0))
        with penalties() as inner:
            penalize("a", torch.tensor(5.0))
        penalize("a", torch.tensor(2.0))
        penalize("b", torch.tensor(3.0))
    assert outer == {"a": torch.tensor(3.0), "b": torch.tensor(3.0)}
    assert inner == {"a": torch.tensor(5.0)}
    assert joined(outer, inner) == {"a": torch.tensor(8.0), "b": torch.tensor(3.0)}


def test_a_collector_ends_with_its_block():
    with pytest.raises(RuntimeError), penalties() as found:
        raise RuntimeError
    penalize("a", torch.tensor(1.0))
    assert found == {}


SPANS = AdaptiveSpanConfig(max_span=10, ramp=2, initial=0.5, penalty=0.1)


def model(config: MechanismConfig, encoder: bool = False) -> Transformer:
    """A decoder of three layers, with or without an encoder like it."""
    attention = AttentionConfig(num_attention_heads=2, mechanism=config)
    stack = StackConfig(num_hidden_layers=3, attention=attention, dropout=0.0)
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(
            vocab_size=11,
            hidden_size=16,
            special=SpecialTokens(bos=1),
            decoder=stack,
            encoder=stack if encoder else None,
        )
    ).double()


def test_training_adds_them_and_evaluation_does_not():
    """Three layers, spans of 5 and a penalty of 0.1 on each layer's mean."""
    net, ids = model(SPANS), torch.randint(11, (2, 9))
    output = net.train()(ids, labels=ids)
    assert output.losses is not None
    assert output.loss is not None
    torch.testing.assert_close(output.losses["span"], torch.tensor(1.5, dtype=torch.float64))
    torch.testing.assert_close(output.loss, output.losses["prediction"] + 1.5)
    assert not any(one.requires_grad for one in output.losses.values())
    judged = net.eval()(ids, labels=ids)
    torch.testing.assert_close(judged.loss, output.losses["prediction"])
    assert judged.losses is not None
    torch.testing.assert_close(judged.losses["span"], output.losses["span"])
    assert net(ids).losses is None


def test_both_sides_of_a_pair_count_and_cross_attention_has_none():
    net, ids = model(SPANS, encoder=True).train(), torch.randint(11, (2, 9))
    output = net(ids, labels=ids)
    torch.testing.assert_close(output.losses["span"], torch.tensor(3.0, dtype=torch.float64))


@pytest.mark.parametrize(
    "config", [SPANS, DynamicSpanConfig(max_span=10, ramp=2, initial=0.0, penalty=0.1)], ids=str
)
def test_recomputed_activations_count_once(config):
    ids, found = torch.randint(11, (2, 9)), []
    for recompute in (False, True):
        net = model(config).train()
        assert net.decoder is not None
        net.decoder.recompute = recompute
        output = net(ids, labels=ids)
        found.append([output.loss, *torch.autograd.grad(output.loss, list(net.parameters()))])
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
