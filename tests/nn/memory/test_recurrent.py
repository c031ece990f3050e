"""Recurrence over segments: Transformer-XL's equations, any split, documents, beams, and what is refused."""

import dataclasses

import pytest
import torch
from plain_recurrence import plain_segments
from torch import Tensor

from pairwise import pairwise
from polyformer.attention.mechanisms import AdaptiveSpanConfig, DynamicSpanConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.patterns import Global, Pattern, Window
from polyformer.attention.positions import (
    AlibiConfig,
    LearnedConfig,
    NoPositionConfig,
    PositionConfig,
    RelationLabelsConfig,
    RopeConfig,
    ShawConfig,
    SinusoidalConfig,
    T5BiasConfig,
    TransformerXLConfig,
)
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation.config import BeamConfig
from polyformer.models.outputs import ModelState
from polyformer.nn.block import BlockConfig, PostNormConfig, PreNormConfig, ReversibleConfig
from polyformer.nn.memory import RecurrentConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

VOCAB, XL, POST = 13, TransformerXLConfig(), PostNormConfig()


def config(
    length: int,
    position: PositionConfig = XL,
    pattern: Pattern | None = None,
    block: BlockConfig = POST,
    layers: int = 2,
    **options: object,
) -> ModelConfig:
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=2, mechanism=SoftmaxConfig(pattern=pattern)),
        position=position,
        block=block,
        dropout=0.0,
        memory=RecurrentConfig(length=length),
    )
    stack = dataclasses.replace(stack, **options)
    return ModelConfig(vocab_size=VOCAB, hidden_size=12, decoder=stack).override("intermediate_size", 16)


def built(settings: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(settings).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def text(rows: int = 2, length: int = 17) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(0, VOCAB, (rows, length))


def by_segments(
    model: Transformer, segments: list[Tensor], state: ModelState | None = None, **more: list[Tensor]
) -> tuple[list[Tensor], ModelState]:
    """The outputs of the segments, and the state after the last; `more`: tensors for each segment."""
    state, outputs = state or model.new_state(), []
    for number, segment in enumerate(segments):
        inputs = {name: tensors[number] for name, tensors in more.items()}
        output = model(segment, state=state, **inputs)
        assert output.state is not None
        state = output.state
        outputs.append(output.last_hidden_state)
    return outputs, state


def slopes(model: Transformer, outputs: list[Tensor]) -> dict[str, Tensor]:
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    grads = torch.autograd.grad(torch.cat(outputs, 1).square().sum(), list(named.values()), allow_unused=True)
    return {name: torch.zeros(1) if grad is None else grad for name, grad in zip(named, grads)}


def same(actual: object, expected: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


SCHEMES = [
    *(TransformerXLConfig(), RopeConfig(), AlibiConfig(), T5BiasConfig(), ShawConfig(), SinusoidalConfig()),
    NoPositionConfig(),
]


@pytest.mark.parametrize("length", [0, 3, 5, 8, 40])
def test_segments_are_the_plain_equations(length: int):
    """In training, gradients too; in evaluation, where keys and values are kept."""
    model, segments = built(config(length)), list(text().split([5, 5, 1, 6], 1))
    expected = plain_segments(model, segments, length)
    ours, _ = by_segments(model.train(), segments)
    same(ours, expected)
    same(slopes(model, ours), slopes(model, expected))
    with torch.no_grad():
        same(by_segments(model.eval(), segments)[0], expected)


@pytest.mark.parametrize(
    ("training", "block", "scheme"),
    pairwise([True, False], [PostNormConfig(), PreNormConfig(), ReversibleConfig()], SCHEMES),
)
def test_a_memory_that_covers_the_text_is_one_pass(
    scheme: PositionConfig, block: BlockConfig, training: bool
):
    model, ids = built(config(16, scheme, block=block)).train(training), text()
    expected = model(ids).last_hidden_state
    for split in ([1] * 17, [5, 1, 11], [16, 1]):
        with torch.no_grad():
            same(torch.cat(by_segments(model, list(ids.split(split, 1)))[0], 1), expected)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.kind)
def test_a_window_within_the_memory_is_one_pass_however_long(scheme: PositionConfig, training: bool):
    """Far behind the memory positions go on: RoPE's angles and sinusoids are those of one pass."""
    model = built(config(4, scheme, Window(4))).train(training)
    ids = text(length=41)
    expected = model(ids).last_hidden_state
    for split in ([1] * 41, [7, 1, 1, 20, 12]):
        with torch.no_grad():
            same(torch.cat(by_segments(model, list(ids.split(split, 1)))[0], 1), expected)


@pytest.mark.parametrize(
    "mechanism", [AdaptiveSpanConfig(max_span=3, ramp=2, initial=0.5), DynamicSpanConfig(max_span=3, ramp=2)]
)
def test_spans_within_the_memory_are_one_pass(mechanism: AdaptiveSpanConfig | DynamicSpanConfig):
    attention = AttentionConfig(num_attention_heads=2, mechanism=mechanism)
    model, ids = built(config(5, attention=attention)), text()
    expected = model(ids).last_hidden_state
    segments = list(ids.split([4, 1, 12], 1))
    with torch.no_grad():
        same(torch.cat(by_segments(model.train(), segments)[0], 1), expected)
        same(torch.cat(by_segments(model.eval(), segments)[0], 1), expected)


def test_a_pattern_of_positions_counts_from_the_beginning_of_the_text():
    """The first token that the memory holds is not the text's first."""
    near, ids = built(config(6, pattern=Window(3), layers=1)).eval(), text()
    model = built(config(6, pattern=Window(3) | Global(1), layers=1)).eval()
    segments = list(ids.split([10, 3, 1, 3], 1))
    with torch.no_grad():
        first, *rest = by_segments(model, segments)[0]
        other, *expected = by_segments(near, segments)[0]
    same(rest, expected)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("training", [True, False])
def test_a_document_does_not_see_the_memory_of_another(training: bool):
    model, ids = built(config(6, RopeConfig())).train(training), text(length=15)
    numbers = torch.tensor([[0] * 7 + [1] * 8, [0] * 4 + [2] * 9 + [3] * 2])
    parts = {"document_ids": list(numbers.split(3, 1))}
    ours, _ = by_segments(model, list(ids.split(3, 1)), **parts)
    other = ids.clone()
    other[0, :7] = (other[0, :7] + 1) % VOCAB
    changed, _ = by_segments(model, list(other.split(3, 1)), **parts)
    whole = torch.cat(ours, 1)
    same(torch.cat(changed, 1)[0, 7:], whole[0, 7:])
    # as a document that is read alone, cut where the segments of the row are
    alone, _ = by_segments(model, [ids[:1, 7:9], ids[:1, 9:12], ids[:1, 12:]])
    same(torch.cat(alone, 1)[0], whole[0, 7:])
    grads = slopes(model.train(), by_segments(model, list(ids.split(3, 1)), **parts)[0])
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scheme", [TransformerXLConfig(), RopeConfig(), SinusoidalConfig()], ids=str)
def test_padding_on_the_left_is_not_remembered(scheme: PositionConfig, training: bool):
    model, ids = built(config(6, scheme)).train(training), text(rows=1, length=12)
    expected = torch.cat(by_segments(model, [ids[:, :2], ids[:, 2:5], ids[:, 5:]])[0], 1)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], 1)
    segments, masks = list(padded.split([3, 6, 3, 7], 1)), [torch.zeros(1, 3), torch.ones(1, 6)]
    masks[1][:, :4] = 0
    masks += [torch.ones(1, 3), torch.ones(1, 7)]
    ours, _ = by_segments(model, segments, attention_mask=masks)
    same(torch.cat(ours, 1)[:, 7:], expected)


def test_the_length_may_change_and_zero_remembers_nothing():
    model, segments = built(config(2)).eval(), list(text().split([5, 6, 6], 1))
    assert model.decoder is not None
    assert model.decoder.memory is not None
    with torch.no_grad():
        for length in (0, 4, 20):
            model.decoder.memory.length = length
            same(by_segments(model, segments)[0], plain_segments(model, segments, length))


def test_a_state_of_training_goes_on_in_evaluation():
    model, segments = built(config(4)), list(text().split([5, 6, 6], 1))
    expected, _ = by_segments(model.train(), segments)
    _, state = by_segments(model, segments[:1])
    with torch.no_grad():
        same(by_segments(model.eval(), segments[1:], state)[0], expected[1:])


def test_the_past_takes_no_more_room_than_the_memory():
    """One token at a time, as in generation: the buffers, and what a token attends to, stay as they are."""
    model = built(config(5)).eval()
    state, sizes = model.new_state(1000), set[int]()
    with torch.no_grad():
        for token in text(length=300).split(1, 1):
            output = model(token, state=state)
            state = output.state
            sizes |= {layer.self_attention.keys.shape[2] for layer in state.layers}
            assert state.tokens.length <= 5
    assert max(sizes) <= 64  # the least that a cache takes
    assert state.tokens.seen == 300
    assert model(text(length=1), state=state, output_attentions=True).attentions[0].shape[-1] == 6


@pytest.mark.parametrize("training", [True, False])
def test_a_state_is_a_value_whose_rows_can_be_reordered(training: bool):
    model, ids = built(config(4)).train(training), text(rows=3)
    with torch.no_grad():
        _, state = by_segments(model, list(ids[:, :9].split([4, 1, 4], 1)))
        order, rest = torch.tensor([2, 0, 0]), list(ids[:, 9:].split([1, 3, 4], 1))
        expected, _ = by_segments(model, rest, state)
        moved, _ = by_segments(model, [part[order] for part in rest], state.reorder(order))
        same(torch.cat(moved, 1), torch.cat(expected, 1)[order])
        again, _ = by_segments(model, rest, state)
        same(again, expected)


def log_probabilities(model: Transformer, ids: Tensor, prompt: int) -> Tensor:
    """What the model says of every token after the prompt, each read alone: [B, new, V]."""
    segments = [ids[:, :prompt], *ids[:, prompt:].split(1, 1)]
    state, logits = model.new_state(), []
    with torch.no_grad():
        for segment in segments[:-1]:
            output = model(segment, state=state)
            state = output.state
            logits.append(model.next_logits(output))
    return torch.stack(logits, 1).log_softmax(-1)


def test_generation_beyond_the_memory_reads_segments_of_one_token():
    model, prompt = built(config(3)).eval(), text(length=4)
    ids = model.generate(prompt, max_new_tokens=12).sequences
    assert torch.equal(log_probabilities(model, ids, 4).argmax(-1), ids[:, 4:])


def test_beams_take_their_memory_with_them():
    """The score of a text that beams wrote is what the text has alone; reordered wrongly it is another's."""
    model, prompt = built(config(3)).eval(), text(length=4)
    texts = model.generate(prompt, num_beams=4, max_new_tokens=12)
    scores = log_probabilities(model, texts.sequences, 4).gather(2, texts.sequences[:, 4:, None]).sum((1, 2))
    same(texts.scores.double(), scores / BeamConfig(num_beams=4).divisor(12), 1e-6)


@pytest.mark.parametrize(
    "settings",
    [config(4, block=PreNormConfig()), config(4, block=ReversibleConfig())],
    ids=["pre", "reversible"],
)
def test_activations_computed_again_give_the_same(settings: ModelConfig):
    """With dropout; a reversible stack finds its inputs again, `recompute` runs its layers again."""
    model = built(settings.override("decoder.dropout", 0.2)).train()
    segments, results = list(text().split([5, 6, 6], 1)), []
    for again in (False, True):
        model.decoder.recompute = again and not model.decoder.reversible
        stored = {} if again else {"output_hidden_states": True}
        state, outputs = model.new_state(), []
        torch.manual_seed(5)
        for segment in segments:
            output = model(segment, state=state, **stored)
            state = output.state
            outputs.append(output.last_hidden_state)
        hidden = [layer.memory.vectors for layer in state.layers]
        results.append((outputs, hidden, slopes(model, outputs)))
    same(results[0], results[1])


def test_layers_that_training_skips_remember_all_the_same():
    model = built(config(4, layers=6, layerdrop=0.5)).train()
    torch.manual_seed(3)
    _, state = by_segments(model, list(text().split([5, 6, 6], 1)))
    assert [layer.memory.vectors.shape[1] for layer in state.layers] == [4] * 6


def test_what_has_no_memory_is_refused():
    with pytest.raises(InputError, match="Learned positions end after 512 tokens"):
        Transformer(config(4, LearnedConfig()))
    with pytest.raises(InputError, match="labels of pairs exist only for the tokens of one call"):
        Transformer(config(4, RelationLabelsConfig(num_labels=3)))
    with pytest.raises(
        InputError, match="'lsh' cannot attend to a memory of earlier segments; use 'softmax'"
    ):
        Transformer(
            config(
                4, NoPositionConfig(), attention=AttentionConfig(num_attention_heads=2, mechanism=LSHConfig())
            )
        )
    with pytest.raises(InputError, match="length: expected 0 or more, got -1"):
        RecurrentConfig(length=-1)
    stack = config(4).decoder
    with pytest.raises(InputError, match=r"encoder\.memory: only a decoder-only model"):
        ModelConfig(vocab_size=VOCAB, hidden_size=12, encoder=stack)
    with pytest.raises(InputError, match="global_projections need the whole text"):
        config(
            4,
            attention=AttentionConfig(
                num_attention_heads=2, mechanism="Window(3) | Global(1)", global_projections=True
            ),
        )


def test_a_draft_is_refused_where_the_memory_ends_too_early():
    model, prompt = built(config(9)).eval(), text(length=4)
    with pytest.raises(InputError, match="draft: 10 tokens are more than the memory of 9"):
        model.generate(prompt, max_new_tokens=6, draft="lookup")
    alone = model.generate(prompt, max_new_tokens=5).sequences
    assert torch.equal(model.generate(prompt, max_new_tokens=5, draft="lookup").sequences, alone)
    windowed = built(config(9, pattern=Window(8))).eval()
    alone = windowed.generate(prompt, max_new_tokens=30).sequences
    assert torch.equal(windowed.generate(prompt, max_new_tokens=30, draft="lookup").sequences, alone)
