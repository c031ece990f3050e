"""The enhanced mask decoder against its definition, written out over the last layer's own weights."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.positions import DebertaConfig, NoPositionConfig
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.block import BlockConfig, ParallelConfig, PostNormConfig, PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import EnhancedMaskedConfig, LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

VOCAB, WIDTH, HEADS = 13, 8, 2
POST = PostNormConfig()


def model(passes: int = 2, block: BlockConfig = POST, **options: Any) -> Transformer:
    attention = AttentionConfig(num_attention_heads=HEADS)
    stack = StackConfig(
        num_hidden_layers=2,
        attention=attention,
        block=block,
        feedforward=DenseConfig(intermediate_size=10, activation="gelu"),
        **{"position": NoPositionConfig(), **options},
    )
    head = EnhancedMaskedConfig(passes=passes, max_position_embeddings=9)
    torch.manual_seed(0)
    transformer = Transformer(
        ModelConfig(vocab_size=VOCAB, hidden_size=WIDTH, encoder=stack, head=head)
    ).double()
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return transformer.eval()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(VOCAB, (2, 7)), torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 0]])


def attention(layer: Any, x: Tensor, read: Tensor, mask: Tensor) -> Tensor:
    """softmax(x Wq (read Wk)^T / sqrt(D)) read Wv Wo over real keys."""
    parts = layer.attention
    q, k, v = (
        project(states).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for project, states in ((parts.query, x), (parts.key, read), (parts.value, read))
    )
    scores = (q @ k.mT / math.sqrt(WIDTH / HEADS)).masked_fill(~mask.bool()[:, None, None], -torch.inf)
    return parts.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def feedforward(layer: Any, x: Tensor) -> Tensor:
    return layer.feedforward.down(F.gelu(layer.feedforward.up(x)))


def decoded(transformer: Transformer, h: Tensor, mask: Tensor) -> Tensor:
    """Logits by the equation: z = h + P[pos], then `passes` times the last layer over h."""
    layer: Any = transformer.get_submodule("encoder.layers.1")
    first, second = layer.block.norms[0], layer.block.norms[-1]
    z = h + transformer.get_submodule("head.position.tables.0")((mask.cumsum(1) - 1).clamp_min(0))
    for _ in range(transformer.config.head.passes):  # type: ignore[attr-defined]
        if isinstance(transformer.config.encoder.block, PostNormConfig):  # type: ignore[union-attr]
            z = first(z + attention(layer, z, h, mask))
            z = second(z + feedforward(layer, z))
        elif isinstance(transformer.config.encoder.block, PreNormConfig):  # type: ignore[union-attr]
            z = z + attention(layer, first(z), first(h), mask)
            z = transformer.encoder.final_norm(z + feedforward(layer, second(z)))
        else:
            normed = first(z)
            z = z + attention(layer, normed, first(h), mask) + feedforward(layer, normed)
            z = transformer.encoder.final_norm(z)
    head: Any = transformer.head
    return head.norm(F.gelu(head.dense(z))) @ transformer.tokens.weight.T + head.bias


@pytest.mark.parametrize("block", [POST, PreNormConfig(), ParallelConfig()], ids=lambda x: x.kind)
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_it_is_its_definition(passes: int, block: BlockConfig):
    """Logits, loss and gradients, with padding on both sides."""
    transformer, (ids, mask) = model(passes, block), batch()
    labels = torch.where(mask.bool() & (torch.arange(7) % 2 == 0), ids, -100)
    output = transformer(ids, mask, labels=labels, output_hidden_states=True)
    logits = decoded(transformer, output.hidden_states[1], mask)
    real = mask.bool()
    torch.testing.assert_close(output.logits[real], logits[real], rtol=1e-10, atol=1e-10)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=1e-10)
    names, parameters = zip(*transformer.named_parameters())
    grads = torch.autograd.grad(output.loss, parameters, retain_graph=True)
    for name, grad, other in zip(names, grads, torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(grad, other, rtol=1e-9, atol=1e-10, msg=name)


def test_only_the_head_knows_absolute_positions():
    """Without positions in the encoder a shuffled text has shuffled hidden states, but not logits."""
    transformer, (ids, _) = model(), batch()
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    plain, shuffled = transformer(ids), transformer(ids[:, order])
    torch.testing.assert_close(shuffled.last_hidden_state, plain.last_hidden_state[:, order])
    assert (shuffled.logits - plain.logits[:, order]).abs().max() > 0.1


def test_it_goes_with_disentangled_positions_and_dropout():
    transformer, (ids, mask) = model(position=DebertaConfig(max_relative_positions=4)), batch()
    transformer.train()
    loss = transformer(ids, mask, labels=ids).loss
    loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in transformer.parameters()
    )


def test_hidden_states_are_returned_only_when_asked_for():
    transformer, (ids, mask) = model(), batch()
    assert transformer(ids, mask).hidden_states is None
    assert len(transformer(ids, mask, output_hidden_states=True).hidden_states) == 3


def test_what_cannot_be_is_refused():
    transformer, (ids, _) = model(), batch()
    with pytest.raises(InputError, match="input of 14 tokens: longer than the 9 learned positions"):
        transformer(torch.cat([ids, ids], 1))
    with pytest.raises(
        InputError, match="head 'enhanced_masked' runs an encoder's last layer again, which a"
    ):
        ModelConfig(vocab_size=5, decoder=StackConfig(), head=EnhancedMaskedConfig())
    with pytest.raises(InputError, match="passes: expected 1 or more, got 0; without any use 'masked'"):
        EnhancedMaskedConfig(passes=0)
    assert LanguageModelConfig.causal


def test_its_table_is_sized_with_the_model():
    config = made_config().override("max_position_embeddings", 33)
    head = Transformer(config).head
    assert isinstance(head.get_submodule("position.tables.0"), nn.Embedding)
    assert head.get_parameter("position.tables.0.weight").shape == (33, WIDTH)
    assert config.max_position_embeddings == 33


def made_config() -> ModelConfig:
    return model().config
