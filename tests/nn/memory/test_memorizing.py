"""The Memorizing Transformer: its equations, documents, padding, beams, sizes, and what is refused."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from plain_memorizing import plainly
from test_recurrent import VOCAB, built, by_segments, config, log_probabilities, same, slopes, text
from torch import Tensor

from pairwise import pairwise
from polyformer.attention.patterns import Window
from polyformer.attention.positions import NoPositionConfig, RopeConfig, Shape
from polyformer.core.errors import InputError
from polyformer.core.state import load_state, save_state
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation.config import BeamConfig
from polyformer.nn.block import BlockConfig, PreNormConfig, ReversibleConfig
from polyformer.nn.memory import MemorizingConfig
from polyformer.nn.memory.memorizing import Memorizing, set_store
from polyformer.nn.stack import AttentionConfig

SPLITS = [[5, 5, 1, 6], [1] * 17, [13, 4]]


def model_of(length: int = 2, settings: ModelConfig | None = None, **options: object) -> Transformer:
    """By default with the store in the last of two layers: what a query sees there went through another."""
    settings = settings or config(length)
    memory = MemorizingConfig(length=length, **{"store": 6, "neighbours": 3, "layer": 1, **options})
    model = built(dataclasses.replace(settings, decoder=dataclasses.replace(settings.decoder, memory=memory)))
    with torch.no_grad():  # `built` moves them by a tenth of a unit, which is much for these
        for parameter in (memory_of(model).gate, memory_of(model).temperature):
            parameter.copy_(torch.linspace(0.05, 0.2, len(parameter)))
    return model


def memory_of(model: Transformer) -> Memorizing:
    memory = model.get_submodule("decoder.memory")
    assert isinstance(memory, Memorizing)
    return memory


@pytest.mark.parametrize(("length", "search", "split"), pairwise([0, 2, 4], ["tiled", "plain"], SPLITS))
def test_segments_are_the_plain_equations(split: list[int], search: str, length: int):
    """Outputs and all gradients in training, the gate's, the temperature's and the queries' among them; the
    store is full in the end, and drops its oldest."""
    model, segments = model_of(length, search=search), list(text(rows=1).split(split, 1))
    expected = plainly(model, segments)
    ours, state = by_segments(model.train(), segments)
    same(ours, expected)
    grads, wanted = slopes(model, ours), slopes(model, expected)
    same(grads, wanted)
    assert all(bool(grads[f"decoder.memory.{name}"].all()) for name in ("gate", "temperature"))
    with torch.no_grad():
        same(by_segments(model.eval(), segments)[0], expected)
    window = state.layers[1].store
    assert int((window.end - window.first)[0]) == 6 + length
    assert state.layers[0].store is None


def test_a_query_that_finds_nothing_has_local_attention_exactly():
    """No store, or none yet: bit for bit a model with a recurrent memory."""
    model, segments = model_of(5), list(text().split([5, 6, 6], 1))
    plain = built(config(5))
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if ".memory." not in k})
    for training in (True, False):
        expected, _ = by_segments(plain.train(training), segments)
        ours, _ = by_segments(model.train(training), segments)
        assert torch.equal(ours[0], expected[0])
        assert torch.equal(ours[1], expected[1]), "all before is in the memory"
        assert not torch.allclose(ours[2], expected[2])
        memory_of(model).size = 0
        ours, _ = by_segments(model, segments)
        assert all(torch.equal(x, y) for x, y in zip(ours, expected))
        memory_of(model).size = 6


def test_the_size_changes_after_training_and_nothing_is_lost_when_it_is_full():
    model, segments = model_of(), list(text(rows=1).split([5, 5, 1, 6], 1))
    outputs = []
    for size in (1, 4, 9, 40):
        set_store(model, size)
        with torch.no_grad():
            outputs.append(by_segments(model.eval(), segments)[0])
            same(outputs[-1], plainly(model, segments))
    assert not torch.allclose(outputs[0][-1], outputs[1][-1])
    with torch.no_grad():  # in the middle of a text too
        _, state = by_segments(model, segments[:3])
        set_store(model, 4)
        same(by_segments(model, segments[3:], state)[0], outputs[1][3:])
    with pytest.raises(InputError, match="store_size: this model has no store"):
        set_store(built(config(3)), 4)
    with pytest.raises(InputError, match="store: expected 0 or more, got -1"):
        set_store(model, -1)


@pytest.mark.parametrize("training", [True, False])
def test_a_document_looks_up_itself_alone(training: bool):
    """Each row on its own; where a document ends, in the middle of a segment, the next has an empty store."""
    model, ids = model_of().train(training), text(length=18)
    numbers = torch.tensor([[0] * 7 + [1] * 11, [0] * 4 + [2] * 9 + [3] * 5])
    parts = {"document_ids": list(numbers.split(3, 1))}
    ours, _ = by_segments(model, list(ids.split(3, 1)), **parts)
    whole = torch.cat(ours, 1)
    other = ids.clone()
    other[0, :7] = (other[0, :7] + 1) % VOCAB
    changed, _ = by_segments(model, list(other.split(3, 1)), **parts)
    same(torch.cat(changed, 1)[0, 7:], whole[0, 7:])
    for row, first in ((0, 7), (1, 13)):  # as a document that is read alone, cut where the segments are
        alone, _ = by_segments(model, _cut(ids[row : row + 1, first:], -first % 3))
        same(torch.cat(alone, 1)[0], whole[row, first:])
    grads = slopes(model.train(), by_segments(model, list(ids.split(3, 1)), **parts)[0])
    assert all(grad.isfinite().all() for grad in grads.values())


def _cut(ids: Tensor, head: int) -> list[Tensor]:
    """The first `head` tokens, then three at a time."""
    return [part for part in (ids[:, :head], *ids[:, head:].split(3, 1)) if part.shape[1]]


@pytest.mark.parametrize("training", [True, False])
def test_the_first_tokens_of_a_segment_may_be_left_out(training: bool):
    """As if the segments' other keys alone had been stored; a segment of no more than that stores nothing."""
    model, ids = model_of(0, store=50).train(training), text(length=17)
    numbers = torch.tensor([[0] * 17, [0] * 7 + [1] * 10])
    split = [5, 5, 1, 6]
    segments, documents = list(ids.split(split, 1)), list(numbers.split(split, 1))
    with torch.no_grad():
        memory_of(model).sinks = 2
        ours, state = by_segments(model, segments, document_ids=documents)
        memory_of(model).sinks = 0
        first, everything = by_segments(model, segments[:1], document_ids=documents[:1])
    same(ours[0], first[0])
    store, whole = (x.layers[1].store.compact() for x in (state, everything))
    assert (store.end - store.first).tolist() == [3 + 3 + 4, 3 + 4]
    same(store.keys[0, :, :3], whole.keys[0, :, 2:5])
    same(store.values[0, :, :3], whole.values[0, :, 2:5])


@pytest.mark.parametrize("training", [True, False])
def test_padding_is_not_stored_wherever_it_stands(training: bool):
    """On the left, the right, and between two parts of a row; a full store keeps as many real tokens."""
    model, ids = model_of(0).train(training), text(rows=1, length=12)  # a memory would count the slots
    expected = torch.cat(by_segments(model, list(ids.split([2, 3, 3, 4], 1)))[0], 1)
    masks = [[0, 0, 1, 1], [0] * 5, [1, 1, 1, 0, 0], [1, 1, 1], [0, 0], [1] * 4]
    segments, place, real = [], 0, []
    for mask in masks:
        row = torch.zeros(1, len(mask), dtype=torch.long)
        count = sum(mask)
        row[0, [i for i, x in enumerate(mask) if x]] = ids[0, place : place + count]
        place += count
        segments.append(row)
        real += mask
    ours, state = by_segments(model, segments, attention_mask=[torch.tensor([mask]) for mask in masks])
    same(torch.cat(ours, 1)[:, torch.tensor(real).bool()], expected)
    store = state.layers[1].store
    assert int((store.end - store.first)[0]) == 6


@pytest.mark.parametrize("training", [True, False])
def test_a_state_is_a_value_whose_rows_can_be_reordered(training: bool):
    model, ids = model_of().train(training), text(rows=3)
    with torch.no_grad():
        _, state = by_segments(model, list(ids[:, :9].split([4, 1, 4], 1)))
        order, rest = torch.tensor([2, 0, 0]), list(ids[:, 9:].split([1, 3, 4], 1))
        other = [part.flip(0) for part in rest]
        expected, _ = by_segments(model, rest, state)
        elsewhere, _ = by_segments(model, other, state)
        moved, _ = by_segments(model, [part[order] for part in rest], state.reorder(order))
        same(torch.cat(moved, 1), torch.cat(expected, 1)[order])
        same(by_segments(model, rest, state)[0], expected)
        same(by_segments(model, other, state.detach())[0], elsewhere)
        _, mine = by_segments(model, rest[:1], state)
        _, theirs = by_segments(model, other[:1], state)  # writes where mine has written
        same(by_segments(model, rest[1:], mine)[0], expected[1:])
        same(by_segments(model, other[1:], theirs)[0], elsewhere[1:])


@pytest.mark.parametrize("training", [True, False])
def test_a_text_left_in_the_middle_is_taken_up_again(training: bool, tmp_path: Path):
    """Bit for bit, from a file that holds no room to spare."""
    model, ids = model_of().train(training), text(length=40)
    numbers = torch.tensor([[0] * 40, [0] * 6 + [1] * 34])
    cut = lambda x: list(x.split([9, 1, 10, 8, 1, 11], 1))  # noqa: E731
    segments, documents = cut(ids), cut(numbers)
    with torch.no_grad():
        expected, _ = by_segments(model, segments, document_ids=documents)
        _, state = by_segments(model, segments[:3], document_ids=documents[:3])
        save_state(state, tmp_path / "state")
        loaded = load_state(tmp_path / "state")
        assert loaded.layers[1].store.keys.shape[2] == 8
        ours, _ = by_segments(model, segments[3:], loaded, document_ids=documents[3:])
    same(ours, expected[3:])


def test_a_store_takes_no_more_room_than_it_may_and_a_token_does_not_copy_it():
    model = model_of(5, store=100, layer=0).eval()
    state, buffers = model.new_state(), []
    with torch.no_grad():
        for token in text(rows=1, length=900).split(1, 1):
            state = model(token, state=state).state
            buffers.append(state.layers[0].store.keys.data_ptr())
            assert state.layers[0].store.keys.shape[2] <= 2 * (100 + 5 + 1)
    moves = sum(a != b for a, b in itertools.pairwise(buffers))
    assert moves <= 12


def test_generation_reads_tokens_one_by_one_and_beams_take_their_store():
    model, prompt = model_of().eval(), text(length=4)
    ids = model.generate(prompt, max_new_tokens=12).sequences
    assert torch.equal(log_probabilities(model, ids, 4).argmax(-1), ids[:, 4:])
    texts = model.generate(prompt, num_beams=4, max_new_tokens=12)
    scores = log_probabilities(model, texts.sequences, 4).gather(2, texts.sequences[:, 4:, None]).sum((1, 2))
    same(texts.scores.double(), scores / BeamConfig(num_beams=4).divisor(12), 1e-6)


@pytest.mark.parametrize("block", [PreNormConfig(), ReversibleConfig()], ids=str)
def test_activations_computed_again_give_the_same(block: BlockConfig):
    """With dropout: what a segment's backward pass looks up again is what its forward pass found."""
    results = []
    for again in (False, True):
        model = model_of(settings=config(2, block=block, dropout=0.2)).train()
        model.decoder.recompute = again and not model.decoder.reversible
        stored = {} if again else {"output_hidden_states": True}
        state, outputs = model.new_state(), []
        torch.manual_seed(5)
        for segment in text().split([5, 6, 6], 1):
            output = model(segment, state=state, **stored)
            state = output.state
            outputs.append(output.last_hidden_state)
        store = state.layers[1].store.compact()
        results.append((outputs, [store.keys, store.values, store.end], slopes(model, outputs)))
    same(results[0], results[1])
    assert bool(results[0][2]["decoder.memory.gate"].any())


def test_a_layer_that_training_skips_stores_all_the_same():
    model = model_of(settings=config(2, layers=6), layer=3).train()
    model.decoder.layerdrop = 0.5
    torch.manual_seed(3)
    _, state = by_segments(model, list(text().split([5, 6, 6], 1)))
    assert (state.layers[3].store.end - state.layers[3].store.first).tolist() == [8, 8]


def test_heads_that_share_keys_look_up_theirs():
    """Grouped queries are those of repeated key heads."""
    ids = list(text().split([5, 6, 6], 1))
    shapes = [AttentionConfig(num_attention_heads=4, num_key_value_heads=n, head_size=4) for n in (2, 4)]
    grouped, whole = (model_of(settings=config(2, RopeConfig(), attention=shape)) for shape in shapes)
    weights = grouped.state_dict()
    for name, tensor in weights.items():
        if ".key." in name or ".value." in name:
            weights[name] = tensor.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    whole.load_state_dict(weights)
    with torch.no_grad():
        same(by_segments(grouped.eval(), ids)[0], by_segments(whole.eval(), ids)[0])


def test_keys_and_queries_have_no_positions(monkeypatch: pytest.MonkeyPatch):
    """With RoPE too: what is stored is the projection alone, of unit length."""
    model, ids = model_of(settings=config(2, RopeConfig()), store=50, layer=0), text(rows=1)
    asked: list[Tensor] = []
    monkeypatch.setattr(memory_of(model), "mix_with_store", lambda y, q, store, context: asked.append(q) or y)
    for training in (True, False):
        asked.clear()
        _, state = by_segments(model.train(training), list(ids.split([5, 1, 11], 1)))
        attention = model.get_submodule("decoder.layers.0.attention")
        queries, keys, values = (
            attention.get_submodule(name)(model.tokens(ids)) for name in ("query", "key", "value")
        )
        same(torch.cat(asked, 2), queries.unflatten(2, (2, -1)).transpose(1, 2))
        store = state.layers[0].store.compact()
        keys = keys.unflatten(2, (2, -1)).transpose(1, 2)
        same(store.keys, keys / keys.norm(dim=-1, keepdim=True))
        same(store.values, values.unflatten(2, (2, -1)).transpose(1, 2))


def test_no_gradient_flows_into_the_store():
    model, segments = model_of().train(), list(text().split([5, 6, 6], 1))
    _, state = by_segments(model, segments[:2])
    store = state.layers[1].store
    assert not any(x.requires_grad for x in (store.keys, store.values))


def test_the_layer_is_at_three_fourths_of_the_depth():
    """The 9th of 12, as in the paper."""
    for layers, expected in ((12, 8), (8, 5), (4, 2), (2, 0), (1, 0)):
        stack = dataclasses.replace(config(2, layers=layers).decoder, memory=MemorizingConfig())
        model = Transformer(dataclasses.replace(config(2), decoder=stack))
        assert memory_of(model).layer == expected


def test_gates_and_temperatures_begin_as_configured():
    """By default as of a new model, or as of one that was trained without a store."""
    shape = Shape(hidden_size=8, max_positions=9, num_layers=2, num_heads=2, head_size=4, embedding_size=None)
    for options, new, added in (({}, (0, 16), (-4, 32)), ({"gate": 1, "temperature": 9}, (1, 9), (1, 9))):
        memory = MemorizingConfig(**options).build(shape)
        for expected in (new, added):
            gate, temperature = 10 * memory.gate, (10 * memory.temperature).exp()
            same(torch.stack([gate, temperature]), torch.tensor(expected)[:, None].expand(2, 2).float(), 1e-5)
            memory.init_added()


@pytest.mark.parametrize(
    ("trains", "layers"),
    [("memory", []), ("layer", ["1"]), ("above", ["1", "2"]), ("model", ["0", "1", "2"])],
)
def test_what_is_frozen_has_no_gradient_and_below_the_store_no_graph(trains: str, layers: list[str]):
    model = model_of(settings=config(2, layers=3), trains=trains).train()
    graphs = {}
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(
            lambda _, x, y, number=number: graphs.update({number: y[0].requires_grad})
        )
    ours, _ = by_segments(model, list(text().split([5, 6, 6], 1)))
    sum(x.square().sum() for x in ours).backward()
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert sorted({name.split(".")[2] for name in names if ".layers." in name}) == layers
    assert {"decoder.memory.gate", "decoder.memory.temperature"} <= {*names}
    assert ("tokens.weight" in names) == graphs[0] == (trains == "model")
    assert graphs[2]


def test_what_makes_no_sense_is_refused():
    for options, words in (
        ({"sinks": 1}, "sinks: expected 0, or a positive number with length=0, got 1"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"trains": "layers"}, "layer"),
        ({"store": -1}, "store: expected 0 or more, got -1"),
        ({"neighbours": 0}, "neighbours: expected 1 or more, got 0"),
        ({"search": "fais"}, "faiss"),
    ):
        with pytest.raises(InputError, match=words):
            MemorizingConfig(**options)
    with pytest.raises(InputError, match="layer: expected 0 to 1, got 2"):
        model_of(layer=2)
    model = model_of(9, config(9, NoPositionConfig(), Window(8)))
    with pytest.raises(InputError, match="draft: 10 tokens are more than the memory of 9"):
        model.eval().generate(text(length=4), max_new_tokens=6, draft="lookup")
