"""Permuted language modelling: what a prediction depends on, and the streams in simple orders."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from polyformer.attention.mechanisms import MechanismConfig
from polyformer.attention.positions import PositionConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer, TwoStreams
from polyformer.models.architectures.two_streams import InOrder
from polyformer.models.config import ModelConfig
from polyformer.nn.block import BlockConfig, PostNormConfig, PreNormConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

VOCAB, LENGTH, WIDTH = 19, 9, 12
ORDER = torch.tensor([[4, 0, 7, 2, 8, 5, 1, 3, 6], [8, 7, 6, 5, 4, 3, 2, 1, 0]])
RANKS = ORDER.argsort(1)


def config(position: str, block: BlockConfig | None = None) -> ModelConfig:
    stack = StackConfig(
        num_hidden_layers=2,
        attention=AttentionConfig(num_attention_heads=3),
        position=PositionConfig.from_dict(position),
        block=block or PostNormConfig(),
        dropout=0.0,
    )
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        max_position_embeddings=15,
        encoder=stack,
        head=LanguageModelConfig(bias=True),
    )


def streams(position: str, block: BlockConfig | None = None) -> TwoStreams:
    """In float64 with weights away from their initial values."""
    torch.manual_seed(3)
    model = TwoStreams(
        Transformer(config(position, block)), nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
    )
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def different_ids() -> Tensor:
    """No token twice in a row, so that a row of the table belongs to a token."""
    torch.manual_seed(1)
    return torch.stack([torch.randperm(VOCAB)[:LENGTH] for _ in range(2)])


@pytest.mark.parametrize("block", [PostNormConfig(), PreNormConfig()], ids=["post", "pre"])
@pytest.mark.parametrize("position", ["xlnet", "learned", "rope", "alibi"])
def test_a_prediction_depends_on_the_tokens_before_it_in_the_order_alone(position: str, block: BlockConfig):
    model, ids = streams(position, block), different_ids()
    hidden = model(ids, RANKS).last_hidden_state
    table = model.model.get_parameter("tokens.weight")
    for row in range(2):
        for place in range(LENGTH):
            slot = ORDER[row, place]
            weights = torch.arange(1, WIDTH + 1).sin()  # a norm makes a plain sum constant
            (slope,) = torch.autograd.grad(
                (hidden[row, slot] * weights).sum(), table, retain_graph=True, allow_unused=True
            )
            of_tokens = torch.zeros(LENGTH) if slope is None else slope[ids[row, ORDER[row]]].abs().sum(1)
            assert not of_tokens[place:].any(), "of itself, and of all later ones"
            assert of_tokens[:place].all(), "of every earlier one"


def test_the_content_stream_of_the_natural_order_is_a_decoder():
    model, ids = streams("xlnet"), different_ids()
    stack = model.model.encoder
    assert stack is not None
    encoder = model.model.config.encoder
    decoder = Transformer(dataclasses.replace(model.model.config, encoder=None, decoder=encoder)).double()
    decoder.load_state_dict(
        {name.replace("encoder", "decoder"): x for name, x in model.model.state_dict().items()}
    )
    expected = decoder.eval()(ids).last_hidden_state
    context = Context(LENGTH, LENGTH)
    position = InOrder(stack.position, torch.arange(LENGTH).expand(2, -1), torch.le)
    h = model.model.tokens(ids)
    for layer in stack.sequence:
        h = layer.rerun(h, h, context, position)
    torch.testing.assert_close(h, expected, rtol=1e-12, atol=1e-12)


def test_the_loss_is_of_the_labelled_tokens():
    model, ids = streams("xlnet"), different_ids()
    labels = ids.masked_fill(RANKS < 4, -100)
    output = model(ids, RANKS, labels=labels)
    logits = output.logits
    expected = nn.functional.cross_entropy(logits[RANKS >= 4], ids[RANKS >= 4])
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        if "segments" not in name and "position.w" not in name:  # there are no segments
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


def test_a_token_of_the_vocabulary_can_be_the_query():
    model, ids = streams("xlnet"), different_ids().clamp(max=VOCAB - 2)
    of_parameter = model(ids, RANKS).last_hidden_state
    assert isinstance(model.query, Tensor)
    with torch.no_grad():
        model.model.get_parameter("tokens.weight")[VOCAB - 1] = model.query
    of_token = TwoStreams(model.model, VOCAB - 1)(ids, RANKS).last_hidden_state
    torch.testing.assert_close(of_token, of_parameter)


def test_what_has_no_two_streams_is_refused():
    encoder = config("xlnet").encoder
    assert encoder is not None
    decoder = Transformer(dataclasses.replace(config("xlnet"), encoder=None, decoder=encoder))
    with pytest.raises(InputError, match="model: two streams run through an encoder alone"):
        TwoStreams(decoder, 1)
    sums = dataclasses.replace(
        config("rope"),
        encoder=dataclasses.replace(
            encoder,
            position=PositionConfig.from_dict("rope"),
            attention=AttentionConfig(num_attention_heads=3, mechanism=MechanismConfig.from_dict("linear")),
        ),
    )
    with pytest.raises(InputError, match="mechanism 'linear' cannot use a position scheme that changes"):
        TwoStreams(Transformer(sums), 1)
    model = streams("xlnet")
    with pytest.raises(InputError, match=r"ranks: expected \(2, 9\), as input_ids, got \(2, 8\)"):
        model(different_ids(), RANKS[:, 1:])
