"""Auxiliary losses: by name, in training alone, and once where activations are recomputed."""

import threading

import pytest
import torch

from polyformer.attention.mechanisms import AdaptiveSpanConfig, DynamicSpanConfig
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.core.ops.layers import (
    add_auxiliary_loss,
    collect_auxiliary_losses,
    sum_auxiliary_losses,
)
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.nn.stack import AttentionConfig, StackConfig


def test_terms_of_one_name_add_up():
    add_auxiliary_loss("lost", torch.tensor(9.0))
    with collect_auxiliary_losses() as outer:
        add_auxiliary_loss("a", torch.tensor(1.0))
        with collect_auxiliary_losses() as inner:
            add_auxiliary_loss("a", torch.tensor(5.0))
        add_auxiliary_loss("a", torch.tensor(2.0))
        add_auxiliary_loss("b", torch.tensor(3.0))
    assert outer == {"a": torch.tensor(3.0), "b": torch.tensor(3.0)}
    assert inner == {"a": torch.tensor(5.0)}
    assert sum_auxiliary_losses(outer, inner) == {"a": torch.tensor(8.0), "b": torch.tensor(3.0)}


def test_a_collector_ends_with_its_block():
    with pytest.raises(RuntimeError), collect_auxiliary_losses() as losses:
        raise RuntimeError
    add_auxiliary_loss("a", torch.tensor(1.0))
    assert losses == {}


SPANS = AdaptiveSpanConfig(max_span=10, ramp=2, initial=0.5, penalty=0.1)


def three_layers(mechanism: MechanismConfig, encoder: bool = False) -> ModelConfig:
    """A decoder of three layers, with or without an encoder like it."""
    attention = AttentionConfig(num_attention_heads=2, mechanism=mechanism)
    stack = StackConfig(num_hidden_layers=3, attention=attention, dropout=0.0)
    return ModelConfig(
        vocab_size=11,
        hidden_size=16,
        special=SpecialTokens(bos=1),
        decoder=stack,
        encoder=stack if encoder else None,
    )


def model(mechanism: MechanismConfig, encoder: bool = False) -> Transformer:
    torch.manual_seed(0)
    return Transformer(three_layers(mechanism, encoder)).double()


def test_training_adds_them_and_evaluation_does_not():
    """Three layers, spans of 5 and an auxiliary loss of 0.1 times each layer's mean."""
    net, ids = model(SPANS), torch.randint(11, (2, 9))
    output = net.train()(ids, labels=ids)
    assert output.losses is not None
    assert output.loss is not None
    torch.testing.assert_close(output.losses["span"], torch.tensor(1.5, dtype=torch.float64))
    torch.testing.assert_close(output.loss, output.losses["prediction"] + 1.5)
    assert not any(loss.requires_grad for loss in output.losses.values())
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
    ids, results = torch.randint(11, (2, 9)), []
    for recompute in (False, True):
        net = model(config).train()
        assert net.decoder is not None
        net.decoder.recompute = recompute
        output = net(ids, labels=ids)
        results.append([output.loss, *torch.autograd.grad(output.loss, list(net.parameters()))])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_models_that_train_in_two_threads_keep_their_own_terms():
    """Both stacks have begun, and collect, before either adds its first term."""
    both_began = threading.Barrier(2)
    ids = torch.randint(11, (2, 9))
    losses: dict[int, dict[str, torch.Tensor]] = {}

    def wait(*_: object) -> None:
        both_began.wait(60)

    def train(max_span: int) -> None:
        config = AdaptiveSpanConfig(max_span=max_span, ramp=2, initial=0.5, penalty=0.1)
        net = Transformer(three_layers(config)).train()
        assert net.decoder is not None
        net.decoder.layers[0].register_forward_pre_hook(wait)
        losses[max_span] = net(ids, labels=ids).losses

    threads = [threading.Thread(target=train, args=(max_span,)) for max_span in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = {max_span: float(terms["span"]) for max_span, terms in losses.items()}
    assert spans == pytest.approx({10: 1.5, 20: 3.0})
