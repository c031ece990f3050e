"""Members that change the weights of softmax attention: differential and low-rank attention."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyformer
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms import DifferentialConfig, SoftmaxConfig, SVDConfig
from polyformer.attention.mechanisms.softmax_attention import EPS, Differential, PairedTerms
from polyformer.attention.positions import BoundPosition, Shape, ShawConfig, Site
from polyformer.attention.positions.by_distance import Shaw
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

HEADS, WIDTH, LENGTH, CLIP = 4, 3, 9, 2


def setting(backend: str) -> tuple[Differential, BoundPosition, list[Tensor]]:
    torch.manual_seed(0)
    mechanism = DifferentialConfig(backend=backend, initial=0.3).build(HEADS, WIDTH).double()
    shape = Shape(hidden_size=HEADS * WIDTH, num_heads=HEADS, head_size=WIDTH)
    position = ShawConfig(clip=CLIP).build(shape).double()
    no_projection = lambda x: x  # noqa: E731
    qkv = [torch.randn(2, HEADS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    return mechanism, BoundPosition(position, Site(0, no_projection, no_projection)), qkv


def equation(mechanism: Differential, position: Shaw, qkv: list[Tensor], causal: bool) -> Tensor:
    """Of each pair, map by map: the values of head h are v_j + a_d, and a pair reads those of both."""
    q, k, v = qkv
    slots = torch.arange(LENGTH)
    entry = CLIP - (slots[:, None] - slots).clamp(-CLIP, CLIP)
    keys, added = position.keys[0](entry), position.values[0](entry)  # [T, T, D]
    scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, keys)) / WIDTH**0.5
    if causal:
        scores = scores.masked_fill(slots > slots[:, None], -torch.inf)
    weights = scores.softmax(-1)
    heads = []
    for half in range(HEADS // 2):
        pair = half, half + HEADS // 2
        values = torch.cat([v[:, head, None] + added for head in pair], -1)  # [B, T, T, 2 D]
        first, second = (torch.einsum("bij,bijd->bid", weights[:, head], values) for head in pair)
        y = first - mechanism.factor() * second
        heads.append(F.rms_norm(y, (2 * WIDTH,), (1 - 0.3) * mechanism.norm_weight, EPS))
    y = torch.stack(heads, 1)
    return torch.cat(y.chunk(2, -1), 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["definition", "tiled", "auto"])
def test_vectors_of_values_are_added_to_both_values_of_a_pair(backend: str, causal: bool):
    mechanism, terms, qkv = setting(backend)
    assert isinstance(terms.position, Shaw)
    learned = [*qkv, *terms.position.parameters(), *mechanism.parameters()]
    results = []
    context = Context(LENGTH, LENGTH, causal=causal)
    for y in (
        mechanism(*qkv, context, None, terms)[0],
        equation(mechanism, terms.position, qkv, causal),
    ):
        weight = torch.arange(y.numel()).view_as(y).cos()
        results.append((y, *torch.autograd.grad((y * weight).sum(), learned)))
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_tables_of_single_heads_are_paired_too():
    _, terms, _ = setting("auto")
    values = torch.arange(float(HEADS)).view(HEADS, 1, 1).expand(HEADS, 5, WIDTH)

    @dataclasses.dataclass(frozen=True, eq=False)
    class OfEachHead(BoundPosition):
        def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative:
            return Relative(first=0, position_values=values)

    paired = PairedTerms(OfEachHead(terms.position, terms.site)).relative(values, values, Context(5, 5))
    assert paired is not None
    assert paired.position_values is not None
    assert paired.position_values[:, 0, ::WIDTH].tolist() == [[0, 2], [1, 3], [0, 2], [1, 3]]


@torch.no_grad()
def test_a_differential_decoder_continues_from_its_cache():
    model = polyformer.create_model("decoder-tiny", attention="differential", position="shaw").eval()
    ids = torch.randint(3, 50, (2, 12))
    state = model(ids[:, :5], use_cache=True).state
    later = model(ids[:, 5:], state=state).last_hidden_state
    torch.testing.assert_close(later, model(ids).last_hidden_state[:, 5:], rtol=1e-4, atol=1e-5)


def inputs(length: int, key_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        2 * torch.randn(2, heads, length, 4, dtype=torch.float64, requires_grad=True)
        for heads in (2, key_heads, key_heads)
    ]


def run(rank: int, tensors: list[Tensor], context: Context) -> Tensor:
    return SVDConfig(rank=rank).build(2, 4)(*tensors, context, None, None)[0]


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_low_rank_is_the_sum_of_the_greatest_singular_values(rank: int):
    q, k, v = (x.detach().numpy() for x in inputs(9))
    y = run(rank, inputs(9), Context(9, 9)).detach().numpy()
    for b in range(2):
        for h in range(2):
            weights = np.exp(q[b, h] @ k[b, h].T / 2)
            weights /= weights.sum(1, keepdims=True)
            u, s, w = np.linalg.svd(weights)
            low = sum(s[i] * np.outer(u[:, i], w[i]) for i in range(rank))
            np.testing.assert_allclose(y[b, h], low @ v[b, h], rtol=1e-9, atol=1e-11)
            assert np.linalg.norm(low - weights, 2) == pytest.approx(s[rank])


def test_full_rank_is_attention_with_its_gradients():
    tensors, context = inputs(9, key_heads=1), Context(9, 9)
    expected = SoftmaxConfig().build(2, 4)(*tensors, context, None, None)[0]
    actual = run(9, tensors, context)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    slopes = [torch.autograd.grad(y.square().sum(), tensors) for y in (actual, expected)]
    for ours, theirs in zip(*slopes):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_padding_takes_no_singular_values():
    """Neither what is masked nor how much of it there is."""
    tensors = inputs(9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[:, :2] = valid[:, 7:] = False
    y = run(2, tensors, Context(9, 9, kv_valid=valid))
    alone = run(2, [x[:, :, 2:7] for x in tensors], Context(5, 5))
    torch.testing.assert_close(y[:, :, 2:7], alone, rtol=1e-10, atol=1e-12)
    assert y[:, :, :2].abs().max() == 0


def test_a_rank_of_nothing_is_refused():
    with pytest.raises(InputError, match="rank: expected 1 or more, got 0"):
        SVDConfig(rank=0)
