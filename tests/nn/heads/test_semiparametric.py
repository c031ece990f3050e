"""SPALM's head beside its equation, token by token: outputs, gradients, masks, gates, what is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pairwise import pairwise
from polyformer import create_model
from polyformer.core.errors import InputError
from polyformer.nn.heads import HeadInput, HeadShape, LanguageModelConfig, SemiparametricConfig
from polyformer.nn.heads.vocabulary import SemiparametricHead

VOCAB, WIDTH = 11, 5


def head(gate: str = "scalar", tied: bool = True) -> SemiparametricHead:
    config = SemiparametricConfig(gate=gate)  # type: ignore[arg-type]
    built = config.build(HeadShape(hidden_size=WIDTH, vocab_size=VOCAB, tied=tied)).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_()
    return built


def inputs(k: int, rows: int = 2, length: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, W, neighbours with some -1 (for the first token all), labels."""
    torch.manual_seed(1)
    h = torch.randn(rows, length, WIDTH, dtype=torch.float64, requires_grad=True)
    table = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    near = torch.randint(-1, VOCAB, (rows, length, k))
    near[0, 0] = -1
    return h, table, near, torch.randint(VOCAB, (rows, length))


def equation(h: Tensor, table: Tensor, near: Tensor, gate: Tensor) -> Tensor:
    """z [B, T, E], one token after the other; gate: [1, E] or [E, E]."""
    z = []
    for state, tokens in zip(h.flatten(0, 1), near.flatten(0, 1).tolist()):
        vectors = [table[token] for token in tokens if token >= 0]
        if not vectors:
            z.append(state)
            continue
        exps = [torch.exp(vector @ state) for vector in vectors]
        m = sum(e / sum(exps) * vector for e, vector in zip(exps, vectors))
        g = 1 / (1 + torch.exp(-gate @ state))
        z.append((1 - g) * m + g * state)
    return torch.stack(z).view_as(h)


@pytest.mark.parametrize(("gate", "tied", "k"), pairwise(["scalar", "vector"], [True, False], [1, 3, 4]))
def test_the_head_is_its_equation(gate: str, tied: bool, k: int):
    module = head(gate, tied)
    h, table, near, labels = inputs(k)
    weight = table if tied else module.weight
    assert isinstance(weight, Tensor)
    leaves = [h, weight, module.gate.weight]
    loss, predictions = module(HeadInput(h, None, table, neighbour_ids=near), labels)
    logits = equation(h, weight, near, module.gate.weight) @ weight.T
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert loss is not None
    torch.testing.assert_close(predictions(), logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for actual, exact in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        torch.testing.assert_close(actual, exact, rtol=1e-10, atol=1e-12)


def test_without_neighbours_the_state_stays_as_it_is():
    module, (h, table, near, _) = head(), inputs(3)
    assert module.states(HeadInput(h, None, table)) is h
    for none in (torch.full_like(near, -1), near[..., :0]):
        z = module.states(HeadInput(h, None, table, neighbour_ids=none))
        assert torch.equal(z, h)
        grads = torch.autograd.grad(z.sum(), [h, table, module.gate.weight])
        assert torch.equal(grads[0], torch.ones_like(h))
        assert not any(grad.any() for grad in grads[1:])


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_a_closed_gate_leaves_the_state_and_an_open_one_the_neighbour(gate: str):
    module, (h, table, _, _) = head(gate), inputs(1)
    near = torch.randint(VOCAB, (*h.shape[:2], 1))
    h = h.detach().abs() + 1
    for sign, expected in ((1e6, h), (-1e6, table[near.squeeze(-1)])):
        torch.nn.init.constant_(module.gate.weight, sign)
        assert torch.equal(module.states(HeadInput(h, None, table, neighbour_ids=near)), expected)


def test_places_and_repetitions():
    """The order of neighbours means nothing; one that is there twice has twice the share; -1 has none."""
    module, (h, table, near, _) = head(), inputs(4)
    read: Callable[[Tensor], Tensor] = lambda near: module.states(  # noqa: E731
        HeadInput(h, None, table, neighbour_ids=near)
    )
    torch.testing.assert_close(read(near.flip(-1)), read(near), rtol=1e-12, atol=1e-12)
    more = torch.cat([near, torch.full_like(near, -1)], -1)
    torch.testing.assert_close(read(more), read(near), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(read(torch.cat([near, near], -1)), read(near), rtol=1e-12, atol=1e-12)


def test_a_model_takes_neighbours_of_its_tokens():
    model = create_model("decoder-tiny", head="semiparametric", vocab_size=VOCAB).double().eval()
    ids, near = torch.randint(VOCAB, (2, 6)), torch.randint(-1, VOCAB, (2, 6, 3))
    output = model(ids, labels=ids, neighbour_ids=near)
    assert not torch.allclose(output.logits, model(ids).logits)
    last = model.logits_at(output, slice(-2, None), near[:, -2:])
    torch.testing.assert_close(last, output.logits[:, -2:], rtol=1e-12, atol=1e-12)
    changed, other = ids.clone(), near.clone()
    changed[:, 4:], other[:, 4:] = (ids[:, 4:] + 1) % VOCAB, 0
    later = model(changed, neighbour_ids=other).logits
    torch.testing.assert_close(later[:, :4], output.logits[:, :4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(later[:, 4:], output.logits[:, 4:])
    padding = torch.nn.functional.pad
    mask = padding(torch.ones_like(ids), (200, 0))
    padded = model(padding(ids, (200, 0)), mask, neighbour_ids=padding(near, (0, 0, 200, 0))).logits
    torch.testing.assert_close(padded[:, 200:], output.logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("near", "message"),
    [
        (torch.zeros(2, 6, dtype=torch.long), r"expected \[batch, length, neighbours\], got \(2, 6\)"),
        (torch.zeros(2, 5, 3, dtype=torch.long), r"expected the shape \(2, 6, 3\), got \(2, 5, 3\)"),
        (torch.zeros(2, 6, 3), "expected integers of 32 or 64 bits"),
        (torch.full((2, 6, 3), -2), "expected -1 or more, got -2"),
        (torch.full((2, 6, 3), VOCAB), f"expected ids below {VOCAB}, or -1 for none, got {VOCAB}"),
        ([1], r"expected \[batch, length, neighbours\]"),
    ],
)
def test_what_are_no_neighbours_is_refused(near: object, message: str):
    model = create_model("decoder-tiny", head="semiparametric", vocab_size=VOCAB)
    with pytest.raises(InputError, match=f"neighbour_ids: {message}"):
        model(torch.zeros(2, 6, dtype=torch.long), neighbour_ids=near)


def test_another_head_reads_none():
    model = create_model("decoder-tiny", vocab_size=VOCAB)
    assert isinstance(model.config.head, LanguageModelConfig)
    with pytest.raises(InputError, match="neighbour_ids: this model's head takes none; use the head 'semi"):
        model(torch.zeros(2, 6, dtype=torch.long), neighbour_ids=torch.zeros(2, 6, 3, dtype=torch.long))
