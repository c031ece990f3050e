"""Attention sinks: each step is recomputed from the kept tokens; bounded caches; what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.nn.memory.kept_tokens import FIRST, LENGTH, VOCAB, recomputed, same, text
from torch import Tensor

from polyformer.attention.mechanisms import AlternateConfig, LSHConfig, MechanismConfig, SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import LearnedConfig, PositionConfig, RopeConfig, T5BiasConfig
from polyformer.attention.positions.rope_extensions import YarnConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence import tokens as reach
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import with_weights
from polyformer.models.checkpoints import from_pretrained
from polyformer.models.checkpoints.convert import convert
from polyformer.models.config import ModelConfig
from polyformer.models.generation.config import BeamConfig
from polyformer.nn.memory import MemoryConfig, NoMemoryConfig, SinksConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

SINKS, NONE, DENSE = SinksConfig(first=FIRST, length=LENGTH), NoMemoryConfig(), SoftmaxConfig()
YARN = RopeConfig(base=50.0, extension=YarnConfig(factor=4.0, original_max_positions=16))
T5 = T5BiasConfig(num_buckets=8, max_distance=12)


def built(
    memory: MemoryConfig,
    position: PositionConfig = YARN,
    mechanism: MechanismConfig = DENSE,
    layers: int = 1,
) -> Transformer:
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=2, mechanism=mechanism),
        position=position,
        memory=memory,
        dropout=0.0,
    )
    settings = ModelConfig(vocab_size=VOCAB, hidden_size=12, decoder=stack).override("intermediate_size", 16)
    torch.manual_seed(0)
    model = Transformer(settings).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def in_chunks(model: Transformer, ids: Tensor, split: list[int], **options: Tensor) -> Tensor:
    state, outputs, start = model.new_state(), [], 0
    for part in ids.split(split, 1):
        own = {name: table[:, start : start + part.shape[1]] for name, table in options.items()}
        output = model(part, state=state, **own)
        state, start = output.state, start + part.shape[1]
        outputs.append(output.last_hidden_state)
    return torch.cat(outputs, 1)


@pytest.fixture(autouse=True)
def _without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches drop each key as soon as it is out of reach."""
    monkeypatch.setattr(reach, "BLOCK", 1)
    monkeypatch.setattr(reach, "MARGIN", 0)


@torch.no_grad()
@pytest.mark.parametrize("position", [YARN, T5], ids=["rope", "t5"])
@pytest.mark.parametrize("split", [[23], [1] * 23, [4, 1, 1, 9, 8]], ids=str)
def test_a_layer_computes_each_step_from_the_kept_tokens(position: PositionConfig, split: list[int]):
    dense = built(NONE, position)
    expected = recomputed(lambda ids: dense(ids).last_hidden_state[:, -1], text())
    same(in_chunks(built(SINKS, position), text(), split), expected)


@torch.no_grad()
@pytest.mark.parametrize("position", [YARN, T5], ids=["rope", "t5"])
def test_padding_and_documents_count_their_own_tokens(position: PositionConfig):
    """In rows of different lengths and in packed prompts, read in chunks."""
    model, ids = built(SINKS, position, layers=2), text(rows=1)
    short, long = ids[:, :14], ids[:, 9:]
    expected = [model(part).last_hidden_state[0] for part in (short, long)]
    packed, numbers = torch.cat([short, long], 1), torch.tensor([[3] * 14 + [4] * 14])
    for split in ([28], [6, 1, 15, 6]):
        same(in_chunks(model, packed, split, document_ids=numbers)[0], torch.cat(expected))
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), short], 1)
    mask = torch.cat([torch.zeros(1, 9), torch.ones(1, 14)], 1)
    both, masks = torch.cat([padded, ids]), torch.cat([mask, torch.ones(1, 23)])
    for split in ([23], [11, 1, 1, 10]):
        outputs = in_chunks(model, both, split, attention_mask=masks)
        same(outputs[0, 9:], expected[0])
        same(outputs[1], model(ids).last_hidden_state[0])


@torch.no_grad()
def test_a_text_within_the_cache_is_bitwise_as_without_the_memory():
    dense = built(NONE, layers=2)
    model, report = convert(dense, memory="sinks(first=2, length=5)")
    assert not report.newly_initialized
    ids = text(length=LENGTH)
    assert torch.equal(model(ids).logits, dense(ids).logits)
    assert not torch.allclose(model(text()).logits, dense(text()).logits)


@torch.no_grad()
def test_a_memory_can_be_added_while_a_model_is_loaded(tmp_path: Path):
    """With quantized weights too, which are not converted; new parameters begin as in a conversion."""
    model, ids = built(NONE).float(), text()
    model.generation = {"max_new_tokens": 3}
    model.save_pretrained(tmp_path / "float")
    loaded = from_pretrained(tmp_path / "float", memory="sinks(first=2, length=5)")
    assert torch.equal(loaded(ids).logits, convert(model, memory=SINKS)[0](ids).logits)
    assert loaded.generation == model.generation
    with_weights(model, "int8").save_pretrained(tmp_path / "int8")
    whole, bounded = (from_pretrained(tmp_path / "int8", memory=memory) for memory in (None, SINKS))
    assert torch.equal(bounded(ids[:, :5]).logits, whole(ids[:, :5]).logits)
    assert not torch.equal(bounded(ids).logits, whole(ids).logits)
    stores = from_pretrained(tmp_path / "float", memory="memorizing(length=3, store=8)")
    assert (stores.decoder.memory.gate < 0).all()


@torch.no_grad()
def test_a_layer_keeps_its_own_window():
    """The sinks are outside a window of 3; the other layer has the whole cache."""
    window = SoftmaxConfig(pattern=Window(2))
    near = built(SINKS, mechanism=window)
    same(near(text()).logits, built(NONE, mechanism=window)(text()).logits)
    mixed = built(SINKS, mechanism=AlternateConfig(mechanisms=(window, DENSE)), layers=2)
    reaches = [layer.attention.reach() for layer in mixed.decoder.sequence]
    assert [(own.last, own.first) for own in reaches] == [(2, 0), (LENGTH - 1, FIRST)]
    same(in_chunks(mixed, text(), [1] * 23), mixed(text()).last_hidden_state)


@torch.no_grad()
def test_the_cache_does_not_grow_and_beams_take_it_with_them():
    model, prompt = built(SINKS, layers=2), text(length=9)
    state = model.new_state()
    for part in text(length=60).split(3, 1):
        state = model(part, state=state).state
        assert all(layer.self_attention.held <= FIRST + LENGTH + 2 for layer in state.layers)
    texts = model.generate(prompt, num_beams=4, max_new_tokens=12)
    logits = model(texts.sequences).logits[:, 8:-1].log_softmax(-1)
    scores = logits.gather(2, texts.sequences[:, 9:, None]).sum((1, 2))
    torch.testing.assert_close(texts.scores.double(), scores / BeamConfig(num_beams=4).divisor(12))


@torch.no_grad()
def test_generation_with_graphs_drafts_and_without_is_the_same():
    model, prompt = built(SINKS).float(), text(length=9)
    expected = model.generate(prompt, max_new_tokens=20).sequences
    assert torch.equal(model.generate(prompt, max_new_tokens=20, draft="lookup").sequences, expected)
    assert torch.equal(model.generate(prompt, max_new_tokens=20, compile=True).sequences, expected)
    with pytest.raises(
        InputError, match="compile: expected a model with a compilable step, but distances to"
    ):
        built(SINKS, T5).generate(prompt, compile=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"position": LearnedConfig()},
            "memory: Learned positions cannot be counted inside a cache; use a sch",
        ),
        ({"mechanism": LSHConfig()}, "memory: mechanism 'lsh' cannot leave out .* drops; use 'softmax'"),
        ({"mechanism": AlternateConfig(mechanisms=(DENSE, LSHConfig()))}, "memory: mechanism 'lsh' cannot"),
    ],
    ids=str,
)
def test_what_cannot_count_inside_a_cache_is_refused(options: dict, said: str):
    with pytest.raises(InputError, match=said):
        built(SINKS, **options)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="length: expected 1 or more, got 0"):
        SinksConfig(length=0)
    settings = built(SINKS).config
    with pytest.raises(InputError, match=r"encoder\.memory: only a decoder-only model can have one"):
        dataclasses.replace(settings, encoder=settings.decoder, decoder=None)
