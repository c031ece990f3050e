"""LSH attention: the union of what the rounds show, counted by hand; no future, one hash for all calls."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.mechanisms import LSHConfig
from polyformer.attention.mechanisms.lsh import lsh as module
from polyformer.attention.mechanisms.lsh.lsh import LSHAttention
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


def build(config: LSHConfig, width: int = 6, seed: int = 0) -> LSHAttention:
    torch.manual_seed(seed)
    return config.build(2, width).double().eval()


def tokens(length: int, width: int = 6, rows: int = 2) -> tuple[Tensor, Tensor]:
    """Queries, which are keys too, and values."""
    torch.manual_seed(1)
    q, v = (torch.randn(rows, 2, length, width, dtype=torch.float64) for _ in range(2))
    return q, v


def alike(length: int) -> tuple[Tensor, Tensor]:
    """Tokens so close in direction that every hash puts them into one bucket, but of different sizes."""
    q, v = tokens(length)
    return (torch.ones(6, dtype=torch.float64) + 1e-3 * q) * (1 + torch.arange(length).view(-1, 1) / 9), v


def run(mechanism: LSHAttention, q: Tensor, v: Tensor, context: Context) -> Tensor:
    return mechanism(q, q, v, context, None, None)[0]


def full(q: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Shared-QK attention over every key but the token's own; the first sees itself."""
    length = q.shape[2]
    seen = ~torch.eye(length, dtype=torch.bool)
    if causal:
        seen = seen.tril()
        seen[0, 0] = True
    scores = q @ F.normalize(q, dim=-1).mT * q.shape[3] ** -0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def window(buckets: Tensor, i: int, size: int, causal: bool) -> set[int]:
    """The slots that token i sees in one round: buckets [T]."""
    mine = [j for j in range(len(buckets)) if buckets[j] == buckets[i]]
    at = mine.index(i)
    return set(mine[max(0, at - size + 1) : at + 1 if causal else at + size])


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_union_of_the_rounds(causal: bool):
    """Token by token: hash, count the window, join the rounds, leave the token itself out."""
    mechanism, (q, v) = build(LSHConfig(rounds=3, buckets=4, window=4)), tokens(37)
    turn = mechanism.directions(q).view(3, 2, 6)
    projected = torch.einsum("bhtd,rfd->bhrtf", q, turn)
    buckets = torch.cat([projected, -projected], -1).argmax(-1)
    assert torch.equal(mechanism.hash(q).long(), buckets)
    y = run(mechanism, q, v, Context(37, 37, causal=causal))
    for b, h, i in ((0, 0, 0), (0, 1, 9), (1, 0, 20), (1, 1, 36)):
        seen = set().union(*(window(round, i, 4, causal) for round in buckets[b, h]))
        keys = sorted(seen - {i} or {i})
        scores = F.normalize(q[b, h, keys], dim=-1) @ q[b, h, i] / 6**0.5
        torch.testing.assert_close(y[b, h, i], scores.softmax(0) @ v[b, h, keys], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_with_one_bucket_it_is_full_attention(causal: bool):
    """However many rounds show a key: it counts once."""
    q, v = alike(50)
    for rounds in (1, 5):
        y = run(build(LSHConfig(rounds=rounds, buckets=4, window=50)), q, v, Context(50, 50, causal=causal))
        torch.testing.assert_close(y, full(q, v, causal), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_full_attention_is_reformer_pytorchs(causal: bool):
    """And so is ours with one bucket, to its precision."""
    peer = pytest.importorskip("reformer_pytorch.reformer_pytorch")
    q, v = alike(24)
    theirs = peer.FullQKAttention(causal=causal)(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(v)
    y = run(build(LSHConfig(buckets=2, window=24)), q, v, Context(24, 24, causal=causal))
    torch.testing.assert_close(y, theirs, rtol=1e-6, atol=1e-6)


def test_more_rounds_come_nearer_to_full_attention():
    q, v = tokens(64)
    expected, errors = full(q * 3, v, True), []
    for rounds in (1, 4, 16, 64):
        y = run(build(LSHConfig(rounds=rounds, buckets=4, window=64)), q * 3, v, Context(64, 64, causal=True))
        errors.append(float((y - expected).square().mean().sqrt()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 20


def test_the_window_counts_the_token_itself():
    """Of size 1: a token sees itself alone. Of size 2: the one before it; the first still itself."""
    q, v = alike(9)
    context = Context(9, 9, causal=True)
    torch.testing.assert_close(run(build(LSHConfig(window=1)), q, v, context), v)
    before = torch.cat([v[:, :, :1], v[:, :, :-1]], 2)
    torch.testing.assert_close(run(build(LSHConfig(window=2)), q, v, context), before)


@pytest.mark.parametrize("length", [150, 300])
def test_chunk_boundaries_do_not_see_the_future(length: int):
    """The published chunks move when later tokens fall into earlier buckets; windows stay."""
    mechanism, (q, v) = build(LSHConfig(rounds=2, buckets=4, window=32)), tokens(300)
    expected = run(mechanism, q, v, Context(300, 300, causal=True))
    seen = 143
    torch.manual_seed(2)
    later = torch.randn(2, 2, length - seen, 6, dtype=torch.float64)
    changed, values = (torch.cat([x[:, :, :seen], later], 2) for x in (q, v))
    actual = run(mechanism, changed, values, Context(length, length, causal=True))
    torch.testing.assert_close(actual[:, :, :seen], expected[:, :, :seen], rtol=0, atol=1e-12)


def test_evaluation_is_the_same_from_call_to_call():
    """Also after torch's generator has moved, in a copy read from a file, and in training."""
    mechanism, (q, v), context = build(LSHConfig()), tokens(80), Context(80, 80, causal=True)
    expected = run(mechanism, q, v, context)
    other = build(LSHConfig(), seed=9)
    assert not torch.equal(other.hash(q), mechanism.hash(q))
    other.load_state_dict(mechanism.state_dict())
    for copy in (mechanism, other, mechanism.train()):
        assert torch.equal(run(copy, q, v, context), expected)


def test_precision_does_not_move_tokens_to_other_buckets():
    """A model in bfloat16 hashes with the directions of the model in float32."""
    mechanism, (q, _) = build(LSHConfig(buckets=8)), tokens(200)
    half = q.bfloat16()
    expected = mechanism.hash(half.float())
    assert torch.equal(mechanism.to(torch.bfloat16).hash(half), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_fills_no_window(causal: bool):
    """Tokens between that are padding, of the same bucket, take no place of a real one."""
    q, v = alike(40)
    mechanism = build(LSHConfig(window=5))
    expected = run(mechanism, q, v, Context(40, 40, causal=causal))
    place = torch.arange(40) * 2
    wide, values = (torch.full((2, 2, 80, 6), 7.0, dtype=torch.float64) for _ in range(2))
    wide[:, :, place], values[:, :, place] = q, v
    valid = (torch.arange(80) % 2 == 0).expand(2, -1)
    y = run(mechanism, wide, values, Context(80, 80, causal=causal, kv_valid=valid))
    torch.testing.assert_close(y[:, :, place], expected, rtol=1e-12, atol=1e-12)
    assert y[:, :, place + 1].abs().max() == 0


@pytest.mark.parametrize(("few", "times"), [(64, 1), (64, 64), (4, 1)])
def test_steps_with_a_state_are_one_pass(few: int, times: int, monkeypatch: pytest.MonkeyPatch):
    """One token after another and in chunks, whether keys are sorted or looked up; documents and padding."""
    monkeypatch.setattr(module, "MAX_LOOKUP_QUERIES", few)
    monkeypatch.setattr(module, "MIN_KEY_RATIO", times)
    mechanism, (q, v) = build(LSHConfig(rounds=2, buckets=4, window=6)), tokens(90)
    documents = (torch.arange(90) > 70).long().expand(2, -1)
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[0, :4] = False
    whole = {"causal": True, "kv_doc": documents, "q_doc": documents, "kv_valid": valid}
    expected = run(mechanism, q, v, Context(90, 90, **whole))
    inputs = [x.clone().requires_grad_() for x in (q, v)]
    state: State | None = mechanism.new_state(0)
    outputs, start = [], 0
    for size in [60, *[1] * 12, 5, 1, 12]:
        own = slice(start, start + size)
        stop = own.stop
        context = Context(
            size,
            stop,
            causal=True,
            kv_doc=documents[:, :stop],
            q_doc=documents[:, own],
            kv_valid=valid[:, :stop],
        )
        new = inputs[0][:, :, own], inputs[0][:, :, own], inputs[1][:, :, own]
        y, state = mechanism(*new, context, state, None)
        outputs.append(y)
        start = stop
    y = torch.cat(outputs, 2)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    again = [x.clone().requires_grad_() for x in (q, v)]
    wanted_y = run(mechanism, again[0], again[1], Context(90, 90, **whole))
    slopes = torch.autograd.grad(wanted_y.sin().sum(), again)
    for actual, wanted in zip(torch.autograd.grad(y.sin().sum(), inputs), slopes):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds: expected 1 or more, got 0"),
        ({"buckets": 7}, "expected an even number of 2 or more .*got 7; use 8"),
        ({"buckets": 0}, "expected an even number of 2 or more .*got 0; use 2"),
        ({"window": 0}, "window: expected 1 or more, got 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, int], message: str):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(LSHConfig(), **options)
