"""The Compressive Transformer's memory: its equations, what each loss trains, documents, what is refused."""

import dataclasses

import pytest
import torch
from plain_recurrence import plain_layer
from test_recurrent import VOCAB, built, by_segments, config, same, text
from torch import Tensor

from polyformer.attention.positions import RopeConfig
from polyformer.core.errors import InputError
from polyformer.core.sequence.tokens import Tokens
from polyformer.models.architectures import Transformer
from polyformer.nn.block import ReversibleConfig
from polyformer.nn.memory import CompressiveConfig, compressive
from polyformer.nn.memory.compressive import COMPRESSIONS, LEARNED

RATE, COMPRESSED = 3, 2


def model_of(length: int = 4, **options: object) -> Transformer:
    settings = config(length)
    memory = CompressiveConfig(length=length, **{"compressed_length": COMPRESSED, "rate": RATE, **options})
    assert settings.decoder is not None
    return built(dataclasses.replace(settings, decoder=dataclasses.replace(settings.decoder, memory=memory)))


@pytest.fixture
def terms(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The terms of the compressor's loss, with gradients; the model has them too."""
    collected: list[Tensor] = []
    add = compressive.add_auxiliary_loss
    monkeypatch.setattr(
        compressive, "add_auxiliary_loss", lambda name, term: collected.append(term) or add(name, term)
    )
    return collected


def content(attention, x: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and weights of x [T, E] attending to read [M, E], head by head."""
    outputs, weights, width = [], [], attention.head_size
    for head in range(attention.config.num_attention_heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (
            y @ part.weight[rows].T + part.bias[rows]
            for part, y in ((attention.query, x), (attention.key, read), (attention.value, read))
        )
        p = (q @ k.T / width**0.5).softmax(1)
        outputs.append(p @ v)
        weights.append(p)
    return torch.stack(outputs), torch.stack(weights)


def plain_group(memory, layer, number: int, group: Tensor, usage: Tensor) -> Tensor:
    """One vector [E] of a group [RATE, E]; usage: [RATE]."""
    name = next(key for key, kind in COMPRESSIONS.items() if type(memory.compress) is kind)
    if name == "mean":
        return sum(group) / RATE
    if name == "max":
        return torch.stack([max(feature) for feature in group.T])
    if name == "most_used":
        return group[int(usage.argmax())]
    if name == "convolution":
        weight = memory.compress.maps[number].weight.unflatten(1, (RATE, -1))
        return sum(weight[:, r] @ group[r] for r in range(RATE)) + memory.compress.maps[number].bias
    first, second = memory.compress.maps[number]
    zero, inner = torch.zeros_like(group[0]), []
    for t in range(RATE):
        before = group[t - 1] if t else zero
        inner.append((first.weight @ torch.cat([before, group[t]]) + first.bias).relu())
    return second.weight @ torch.cat([inner[0], inner[2]]) + second.bias


def plainly(model: Transformer, segments: list[Tensor], length: int) -> tuple[list[Tensor], Tensor]:
    """The outputs of the segments of one row, and the sum of the attention-reconstruction losses."""
    stack = model.get_submodule("decoder")
    empty = torch.empty(0, 12, dtype=torch.float64)
    recent, compressed = [empty] * 2, [empty] * 2
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    for ids in segments:
        h = model.tokens.weight[ids]
        for number, layer in enumerate(stack.layers):
            both = torch.cat([compressed[number], recent[number], h[0]]).unsqueeze(0)
            x = h[0].detach()
            h = plain_layer(layer, stack.position, number, h, both)
            joined = torch.cat([recent[number], x])
            groups = max(0, len(joined) - length) // RATE
            old, recent[number] = joined[: groups * RATE], joined[groups * RATE :]
            if not groups:
                continue
            usage = content(layer.attention, x, old)[1].mean((0, 1))
            new = torch.stack(
                [
                    plain_group(stack.memory, layer, number, *pair)
                    for pair in zip(old.split(RATE), usage.split(RATE))
                ]
            )
            if stack.memory.loss == "attention":
                difference = content(layer.attention, x, old)[0] - content(layer.attention, x, new)[0]
                total = total + difference.square().mean()
            compressed[number] = torch.cat([compressed[number], new.detach()])[-COMPRESSED:]
        outputs.append(h)
    return outputs, total


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("split", [[5, 5, 1, 6], [1] * 17, [13, 4]])
def test_segments_are_the_plain_equations(name: str, split: list[int], terms: list[Tensor]):
    model, segments = model_of(compression=name), list(text(rows=1).split(split, 1))
    expected, loss = plainly(model, segments, 4)
    outputs, state = by_segments(model.train(), segments)
    same(outputs, expected)
    assert bool(terms) == (name in LEARNED)
    same(torch.as_tensor(sum(terms), dtype=torch.float64), loss)
    with torch.no_grad():
        same(by_segments(model.eval(), segments)[0], expected)
    assert state.layers[0].memory.compressed.shape[1] == COMPRESSED


@pytest.mark.parametrize("loss", ["attention", "autoencoding"])
@pytest.mark.parametrize("name", LEARNED)
def test_each_loss_trains_its_own_weights_alone(name: str, loss: str, terms: list[Tensor]):
    """The compressor learns by its loss and by nothing else; key projections learn through the memory."""
    model = model_of(compression=name, loss=loss).train()
    segments = list(text().split([5, 6, 6], 1))
    compressor = {key for key, _ in model.named_parameters() if "memory." in key}
    assert compressor
    outputs, _ = by_segments(model, segments)
    torch.stack(terms).sum().backward(retain_graph=True)
    assert {
        key for key, x in model.named_parameters() if x.grad is not None and bool(x.grad.any())
    } == compressor
    model.zero_grad()
    outputs[-1].square().sum().backward()
    trained = {key for key, x in model.named_parameters() if x.grad is not None and bool(x.grad.any())}
    assert not trained & compressor
    assert {"decoder.layers.0.attention.key.weight", "decoder.layers.1.attention.key.weight"} <= trained


def test_autoencoding_is_the_squared_error_of_the_old_memory(terms: list[Tensor]):
    model, ids = model_of(loss="autoencoding").train(), text(rows=1, length=7)
    memory = model.get_submodule("decoder").memory
    _, state = by_segments(model, list(ids.split([4, 3], 1)))
    x = model.tokens.weight[ids[0, :3]].detach().flatten()
    new = memory.compress.maps[0](x)
    same(terms[0], (x - memory.decoders[0](new)).square().mean())
    same(state.layers[0].memory.compressed[0, 0], new.detach())


def test_the_model_adds_the_loss_to_its_own(terms: list[Tensor]):
    model, ids = model_of().train(), text()
    output = model(ids, state=model.new_state(), labels=ids)
    same(output.losses["compression"], torch.stack(terms).sum().detach())
    same(output.loss.detach(), output.losses["prediction"] + output.losses["compression"])


@pytest.mark.parametrize("training", [True, False])
def test_no_document_sees_another_and_no_padding_counts(training: bool):
    """What lies in the groups of others, or under padding, changes nothing."""
    model, ids = model_of().train(training), text(length=15)
    numbers = torch.tensor([[0] * 4 + [1] * 11, [0] * 2 + [2] * 13])
    mask = torch.ones(2, 15)
    mask[1, :2] = 0
    parts = {"document_ids": list(numbers.split(3, 1)), "attention_mask": list(mask.split(3, 1))}
    ours, _ = by_segments(model, list(ids.split(3, 1)), **parts)
    other = ids.clone()
    other[0, :4] = (other[0, :4] + 1) % VOCAB
    other[1, :2] = (other[1, :2] + 1) % VOCAB
    changed, state = by_segments(model, list(other.split(3, 1)), **parts)
    same(torch.cat(changed, 1)[0, 4:], torch.cat(ours, 1)[0, 4:])
    same(torch.cat(changed, 1)[1, 2:], torch.cat(ours, 1)[1, 2:])
    assert state.tokens.valid.tolist()[0][:COMPRESSED] == [False, True]


def test_a_group_is_real_only_if_all_its_tokens_are_of_one_document():
    """A new document may begin at the last token of a group alone."""
    memory = model_of(length=2, compressed_length=4).decoder.memory
    numbers = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]])
    remembered = memory.remembered_tokens(Tokens(8, doc=numbers))
    assert remembered.valid.tolist() == [[False, True, True, True], [True, False, True, True]]


def test_positions_go_on_without_a_gap():
    """With RoPE: numbered or counted, compressed slots come right before the others."""
    settings = config(4, RopeConfig())
    stack = dataclasses.replace(
        settings.decoder, memory=CompressiveConfig(length=4, compressed_length=2, rate=3, compression="mean")
    )
    model = built(dataclasses.replace(settings, decoder=stack)).eval()
    segments, places = (
        list(text().split([5, 6, 6], 1)),
        list(torch.arange(17).expand(2, -1).split([5, 6, 6], 1)),
    )
    with torch.no_grad():
        expected, _ = by_segments(model, segments)
        ours, state = by_segments(model, segments, position_ids=places)
    same(ours, expected)
    assert state.tokens.merged == 2
    assert state.tokens.pos[0].tolist() == list(range(17 - state.tokens.length, 17))


def test_generation_reads_tokens_one_by_one_and_beams_take_their_memory():
    model, prompt = model_of().eval(), text(length=4)
    ids = model.generate(prompt, max_new_tokens=12).sequences
    state, last = model.new_state(), None
    with torch.no_grad():
        for number, segment in enumerate([ids[:, :4], *ids[:, 4:-1].split(1, 1)]):
            output = model(segment, state=state)
            state, last = output.state, model.next_logits(output)
            assert torch.equal(last.argmax(-1), ids[:, 4 + number])
    rows = torch.tensor([1, 0, 0])
    again, _ = by_segments(model, [prompt[rows]], state.reorder(rows))
    expected, _ = by_segments(model, [prompt], state)
    same(again[0], expected[0][rows])


def test_what_makes_no_sense_is_refused():
    for options, words in (
        ({"rate": 1}, "rate: expected 2 or more, got 1"),
        (
            {"compressed_length": 0},
            "compressed_length: expected 1 or more, got 0; without compressed vectors use",
        ),
        ({"compression": "meen"}, "mean"),
        ({"compression": "max", "loss": "attention"}, "compression 'max' has no weights"),
    ):
        with pytest.raises(InputError, match=words):
            CompressiveConfig(**options)
    with pytest.raises(
        InputError, match="'compressive' is trained in the forward pass, which a reversible stack runs twice"
    ):
        config(4, block=ReversibleConfig(), memory=CompressiveConfig())
