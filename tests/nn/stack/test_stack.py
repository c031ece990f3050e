"""Stacks: layers in turn, norms at the end, recomputation in place of memory, embeddings below."""

import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.positions import (
    LearnedConfig,
    LearnedPerLayerConfig,
    NoPositionConfig,
    Position,
    PositionConfig,
    Shape,
)
from polyformer.core.errors import InputError
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.nn.block import ParallelConfig, PostNormConfig, PreNormConfig, ReversibleConfig
from polyformer.nn.feedforward import DenseConfig, NoFeedForwardConfig
from polyformer.nn.stack import (
    AttentionConfig,
    Embedding,
    EmbeddingConfig,
    LayerCall,
    Stack,
    StackConfig,
    build_stack,
)


def new_stack(cross: bool = False, **options: Any) -> Stack:
    torch.manual_seed(0)
    attention = AttentionConfig(num_attention_heads=2)
    parts = {
        "num_hidden_layers": 3,
        "attention": attention,
        "feedforward": DenseConfig(intermediate_size=8),
        **options,
    }
    return build_stack(StackConfig(**parts), 6, 20, attention if cross else None).double()


def test_layers_follow_one_another():
    stack = new_stack(block=PreNormConfig(), position=LearnedPerLayerConfig()).eval()
    x, pos, context = torch.randn(2, 5, 6).double(), torch.arange(5), Context(5, 5, causal=True)
    collected: list[Tensor] = []
    y, states = stack(x, pos, context, collect=collected)
    hidden = x
    for index, layer in enumerate(stack.layers):
        if index:
            hidden = hidden + stack.position.tables[index](pos)
        assert torch.equal(collected[index], hidden)
        hidden, _ = layer(hidden, LayerCall(context, stack.position))
    assert torch.equal(y, stack.final_norm(hidden))
    assert torch.equal(collected[3], y)
    assert len(collected) == 4
    assert states is None


def test_the_final_norm_is_there_where_the_stream_is_not_normalised():
    for block in (PreNormConfig(), ParallelConfig()):
        assert isinstance(new_stack(block=block).final_norm, torch.nn.LayerNorm)
    assert isinstance(new_stack(block=PostNormConfig()).final_norm, torch.nn.Identity)


@pytest.mark.parametrize("block", [PreNormConfig(), PostNormConfig()])
def test_recomputing_gives_equal_gradients(block: PreNormConfig | PostNormConfig):
    """Dropout included: the second time the same weights are dropped. Fewer activations are kept."""
    results, kept = [], []
    for recompute in (False, True):
        stack = new_stack(block=block, dropout=0.3).train()
        stack.recompute = recompute
        x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(2, 5, 6).requires_grad_()
        torch.manual_seed(1)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda entry, saved=saved: saved.append(entry.numel()) or entry, lambda entry: entry
        ):
            y, _ = stack(x, torch.arange(5), Context(5, 5, causal=True))
        grads = torch.autograd.grad(y.square().sum(), [x, *stack.parameters()])
        results.append([y, *grads])
        kept.append(sum(saved))
    for plain, again in zip(*results):
        assert torch.equal(plain, again)
    assert kept[1] < kept[0] / 4


def test_recomputation_is_of_training_alone():
    stack = new_stack().eval()
    stack.recompute = True
    x = torch.randn(1, 3, 6).double()
    states = stack.new_states(0)
    y, states = stack(x, torch.arange(3), Context(3, 3, causal=True), states=states)
    stack.recompute = False
    assert states is not None
    assert torch.equal(y, stack(x, torch.arange(3), Context(3, 3, causal=True))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected 1 to 4096, got 0"),
        ({"dropout": 1.0}, "dropout: expected a probability in [0, 1), got 1.0"),
        ({"dropout": -0.1}, "dropout: expected a probability in [0, 1), got -0.1"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        StackConfig(**options)
    assert str(caught.value) == message


NOWHERE = NoPositionConfig().build(Shape(hidden_size=6))


def embedding(position: Position = NOWHERE, **options: Any) -> Embedding:
    torch.manual_seed(0)
    return Embedding(EmbeddingConfig(**options), 6, LayerNormConfig(), 0.5, position).double().eval()


def test_the_embedding_sum():
    """Vectors, scaled, plus positions, plus types, then a norm."""
    position = LearnedConfig().build(Shape(hidden_size=6, max_positions=9)).double()
    tokens, pos, types = torch.randn(2, 3, 6).double(), torch.arange(3), torch.tensor([[0, 1, 1], [1, 0, 0]])
    module = embedding(scaled=True, normed=True, type_vocab_size=2)
    assert module.types is not None
    total = tokens * math.sqrt(6) + module.types(types) + next(position.parameters())[pos]
    torch.testing.assert_close(
        module(tokens, position, pos, ModelInputs(token_type_ids=types)),
        module.norm(total),
        rtol=1e-12,
        atol=1e-12,
    )
    assert torch.equal(
        module(tokens, position, pos, ModelInputs()),
        module(tokens, position, pos, ModelInputs(token_type_ids=torch.zeros_like(types))),
    )
    assert torch.equal(embedding()(tokens, NOWHERE, pos, ModelInputs()), tokens)


@pytest.mark.parametrize(
    ("kind", "added"), [("sinusoidal", True), ("step_sinusoid", True), ("learned", False), ("rope", False)]
)
def test_token_vectors_are_scaled_by_default_where_sinusoids_are_added(kind: str, added: bool):
    """So that both are of one size: unscaled, vectors of length 1 stand beside sinusoids of sqrt(E / 2)."""
    position = PositionConfig.from_dict(kind).build(Shape(hidden_size=6, head_size=2)).double()
    tokens, types, pos = torch.randn(2, 3, 6).double(), torch.tensor([[0, 1, 1], [1, 0, 0]]), torch.arange(3)
    beside = position.embed(torch.zeros_like(tokens), pos, 0)
    for scaled, of_tokens, of_types in ((None, added, added), (True, True, False), (False, False, False)):
        module = embedding(position, scaled=scaled, type_vocab_size=2)
        assert module.types is not None
        factors = [math.sqrt(6) if times else 1.0 for times in (of_tokens, of_types)]
        total = factors[0] * tokens + factors[1] * module.types(types) + beside
        torch.testing.assert_close(
            module(tokens, position, pos, ModelInputs(token_type_ids=types)), total, rtol=1e-12, atol=1e-12
        )


def test_the_embedding_sum_is_dropped_from_in_training():
    module, x = embedding().train(), torch.ones(4, 50, 6).double()
    dropped = module(x, NOWHERE, torch.arange(50), ModelInputs())
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_token_types_that_a_model_does_not_have_are_refused():
    x = torch.randn(1, 2, 6).double()
    with pytest.raises(InputError) as caught:
        embedding()(
            x,
            NoPositionConfig().build(Shape(hidden_size=6)),
            torch.arange(2),
            ModelInputs(token_type_ids=torch.zeros(1, 2, dtype=torch.long)),
        )
    assert str(caught.value) == (
        "token_type_ids: this model has none (embedding.type_vocab_size is 0); leave them out"
    )


def test_layerdrop_leaves_out_whole_layers_in_training_alone():
    """Each draw gives the output of some of the layers in their order, and each layer's share is right."""
    stack = new_stack(block=PreNormConfig(), dropout=0.0, layerdrop=0.3)
    x, pos, context = torch.randn(1, 4, 6).double(), torch.arange(4), Context(4, 4, causal=True)

    def through(layers: tuple[int, ...]) -> Tensor:
        hidden = x
        for index in layers:
            hidden, _ = stack.layers[index](hidden, LayerCall(context, stack.position))
        return stack.final_norm(hidden)

    subsets = [entry for size in range(4) for entry in itertools.combinations(range(3), size)]
    expected = torch.stack([through(entry) for entry in subsets])
    torch.manual_seed(0)
    counts = [0] * len(subsets)
    with torch.no_grad():
        for _ in range(400):
            y, _ = stack.train()(x, pos, context)
            counts[int((expected - y).abs().amax((1, 2, 3)).argmin())] += 1
            assert (expected - y).abs().amax((1, 2, 3)).min() < 1e-12
    for layer in range(3):
        share = sum(n for entry, n in zip(subsets, counts) if layer not in entry) / 400
        assert abs(share - 0.3) < 0.1
    assert torch.equal(stack.eval()(x, pos, context)[0], expected[-1])
    states = stack.new_states(4)
    assert torch.equal(stack.train()(x, pos, context, states=states)[0], expected[-1])


def test_dropout_of_the_output_comes_after_the_final_norm():
    stack = new_stack(block=PreNormConfig(), dropout=0.0, final_dropout=0.5).train()
    x, pos, context = torch.randn(8, 5, 6).double(), torch.arange(5), Context(5, 5)
    y, plain = stack(x, pos, context)[0], stack.eval()(x, pos, context)[0]
    dropped = y == 0
    assert 0.3 < dropped.double().mean() < 0.7
    torch.testing.assert_close(y[~dropped], 2 * plain[~dropped])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layerdrop": 1.0}, "layerdrop: expected a probability in [0, 1), got 1.0"),
        ({"final_dropout": -0.1}, "final_dropout: expected a probability in [0, 1), got -0.1"),
        ({"layerdrop": 0.1, "block": ReversibleConfig()}, "layerdrop: a reversible stack cannot skip"),
        (
            {"feedforward": NoFeedForwardConfig(), "block": ReversibleConfig()},
            "feedforward: a reversible layer has two sub-layers, got 'none'",
        ),
    ],
)
def test_layers_that_cannot_be_left_out_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=re.escape(message)):
        StackConfig(**options)


def test_a_group_has_the_attention_of_its_own_layers():
    near, far = Window(1), Window(2)
    config = StackConfig(
        num_hidden_layers=4,
        num_hidden_groups=2,
        attention=AttentionConfig(mechanism=SoftmaxConfig(pattern=PerLayer((near, near, far, far)))),
    )
    layers = build_stack(config, 64, 16).layers
    patterns = [layer.get_submodule("attention.mechanism").config.pattern for layer in layers]  # type: ignore[union-attr]
    assert patterns == [near, far]
