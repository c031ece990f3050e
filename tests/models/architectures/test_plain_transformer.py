"""The Transformer of examples/plain_transformer.py equals the preset of 2017 with the same weights."""

import ast
import math
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyformer
from polyformer.training.optimizers import Noam
from registered import EVERYTHING

FILE = Path(__file__).parents[3] / "examples" / "plain_transformer.py"
PLAIN = SimpleNamespace(**runpy.run_path(str(FILE)))

VOCAB, WIDTH, HEADS, INNER, LAYERS = 23, 12, 3, 20, 2
RENAMED = {
    "encoder.": "encoder.layers.",
    "decoder.": "decoder.layers.",
    "feed_forward.0": "feedforward.up",
    "feed_forward.2": "feedforward.down",
    "norms": "block.norms",
    "embedding.table": "tokens.weight",
}


def polyformer_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    return renamed


def pair(seed: int) -> tuple[Any, polyformer.Transformer]:
    """Both models with the same random weights, norms and biases too, in float64 and without dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = PLAIN.Transformer(VOCAB, WIDTH, LAYERS, HEADS, INNER, dropout=0.0).double()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        model = polyformer.create_model(
            "transformer-base",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            dropout=0.0,
        ).double()
    model.load_state_dict(polyformer_names(plain.state_dict()))
    return plain, model


def sentences(seed: int, *lengths: int) -> list[list[int]]:
    """Random words, then the end token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [*torch.randint(3, VOCAB, (length - 1,), generator=generator).tolist(), PLAIN.END]
        for length in lengths
    ]


def padded(rows: list[list[int]]) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, PLAIN.PAD)


def outputs(model: polyformer.Transformer, source: Tensor, target: Tensor) -> polyformer.ModelOutput:
    labels = target.masked_fill(target == PLAIN.PAD, -100)
    return model(source, attention_mask=source != PLAIN.PAD, labels=labels)


def close(actual: Tensor | None, expected: Tensor | None, name: str = "") -> None:
    assert actual is not None, name
    assert expected is not None, name
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


def test_logits_loss_and_gradients():
    """With padding on both sides, and label smoothing."""
    plain, model = pair(0)
    source, target = padded(sentences(1, 9, 4, 1)), padded(sentences(2, 7, 2, 5))
    shifted = torch.cat([torch.full((3, 1), PLAIN.START), target[:, :-1]], 1)
    logits = plain(source, shifted)
    expected = outputs(model, source, target)
    close(logits, expected.logits)
    loss = PLAIN.smoothed_loss(logits, target)
    close(loss, expected.loss)
    loss.backward()
    assert expected.loss is not None
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    parameters = dict(model.named_parameters())
    gradients = polyformer_names(gradients)
    assert gradients.keys() == parameters.keys()
    for name, parameter in parameters.items():
        close(gradients[name], parameter.grad, name)


def test_learning_rate():
    base = Noam(hidden_size=512)
    assert all(
        PLAIN.learning_rate(step, 512) == pytest.approx(base.factor(step, 100_000), rel=1e-12)
        for step in (1, 2, 3999, 4000, 4001, 100_000)
    )
    assert max(range(1, 900), key=lambda step: PLAIN.learning_rate(step, 64, warmup=200)) == 200


def test_training():
    """Three steps of the example's loop, and of a loop around the preset."""
    plain, model = pair(3)
    pairs = list(zip(sentences(4, *range(2, 80)), sentences(5, *range(81, 3, -1))))
    random.seed(6)
    PLAIN.train(plain, pairs, steps=3)
    random.seed(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    rate = Noam(hidden_size=WIDTH, warmup=200)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate.factor(done + 1, 3))
    for _, (source, target) in zip(range(3), PLAIN.batches(pairs, tokens=600)):
        optimizer.zero_grad()
        loss = outputs(model, source, target).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        schedule.step()
    trained = polyformer_names(plain.state_dict())
    for name, tensor in model.state_dict().items():
        close(trained[name], tensor, name)


@pytest.fixture(scope="module")
def trained() -> tuple[Any, polyformer.Transformer]:
    """Both models after the example's loop has learned a little of a task, to reverse words."""
    plain, model = pair(3)
    sources = [words for seed in range(30) for words in sentences(seed, *range(3, 11))]
    random.seed(0)
    PLAIN.train(plain, [(words, [*words[-2::-1], PLAIN.END]) for words in sources], steps=100)
    model.load_state_dict(polyformer_names(plain.state_dict()))
    return plain.eval(), model.eval()


@pytest.mark.parametrize(("beams", "alpha"), [(4, 0.6), (2, 0.0), (5, 1.0)])
def test_beam_search(trained: tuple[Any, polyformer.Transformer], beams: int, alpha: float):
    plain, model = trained
    texts = []
    for words in sentences(100, *range(1, 15, 1 if EVERYTHING else 3)):
        source = torch.tensor(words)
        texts.append(PLAIN.beam_search(plain, source, beams, alpha))
        options = {"num_beams": beams, "length_penalty": alpha, "max_new_tokens": len(words) + 50}
        assert texts[-1] == model.generate(source[None], **options).new_tokens()[0]
    assert len({len(text) for text in texts}) > 3


def test_beam_search_has_a_limit(trained: tuple[Any, polyformer.Transformer]):
    """A penalty that rewards length makes every text as long as it may be."""
    plain, model = trained
    source = torch.tensor(sentences(101, 5)[0])
    text = PLAIN.beam_search(plain, source, alpha=2.0)
    assert len(text) == 55
    expected = model.generate(source[None], num_beams=4, length_penalty=2.0, max_new_tokens=55)
    assert text == expected.new_tokens()[0]


def test_length_penalty():
    """log P is -1 for [END] and -1.09 for [3, END]; (7/6)^0.6 is 1.097, (7/6)^0.5 is 1.080."""
    first, later = math.exp(-1), math.exp(-1.09) / (1 - math.exp(-1))

    def decode(texts: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        end = first if texts.shape[1] == 1 else later
        return torch.tensor([0, 0, end, 1 - end]).log().expand(len(texts), 1, 4)

    model = SimpleNamespace(encode=lambda source: torch.zeros(1, 2, 1), decode=decode)
    assert PLAIN.beam_search(model, torch.tensor([3, PLAIN.END]), alpha=0.6) == [3, PLAIN.END]
    assert PLAIN.beam_search(model, torch.tensor([3, PLAIN.END]), alpha=0.5) == [PLAIN.END]


def test_batches_have_every_pair_once_and_little_padding():
    pairs = list(zip(sentences(7, *range(2, 42)), sentences(8, *range(42, 2, -1))))
    stream = PLAIN.batches(pairs, tokens=90)
    rows: list[tuple[list[int], ...]] = []
    while len(rows) < len(pairs):
        sides = next(stream)
        assert max(side.numel() for side in sides) <= 90
        rows += zip(*([row[row != PLAIN.PAD].tolist() for row in side] for side in sides))
    assert sorted(rows) == sorted(pairs)


@pytest.mark.parametrize(
    ("rows", "english", "german"),
    [
        (
            "today/heute, /, dog/Hund/0, small/klein, the/der e/die e/das e/den en, "
            "man/Mann/0, tired/müd, the/der e/die e/das e/den en, calls/call/ruft/an/anrufen",
            "today the small dog calls the tired man",
            "heute ruft der kleine Hund den müden Mann an",
        ),
        (
            "/, wants to/will, cow/Kuh/1, /, a/ein er/eine e/ein es/einen en, "
            "child/Kind/2, big/groß, a/ein er/eine e/ein es/einen en, looks at/look at/sieht/an/ansehen",
            "a cow wants to look at a big child",
            "eine Kuh will ein großes Kind ansehen",
        ),
    ],
)
def test_grammar(rows: str, english: str, german: str, monkeypatch: pytest.MonkeyPatch):
    picked = iter(rows.split(", "))
    monkeypatch.setitem(PLAIN.sentence_pair.__globals__, "pick", lambda table: next(picked).split("/"))
    assert [text.split() for text in PLAIN.sentence_pair()] == [english.split(), german.split()]
    assert not list(picked)


def test_a_sentence_has_a_single_translation():
    random.seed(9)
    pairs = {PLAIN.sentence_pair() for _ in range(5000)}
    assert len({english for english, _ in pairs}) == len({german for _, german in pairs}) == len(pairs)


def test_the_file_is_short_and_needs_torch_only():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name.split(".")[0]
        for node in imports
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
        )
    }
    assert names - sys.stdlib_module_names == {"torch"}
