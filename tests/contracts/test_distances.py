"""Mechanisms that choose the keys of a query take positions that change scores: K1 to K5, K8 and K11 of them.

Not with every scheme, but with one of each kind of terms that `relative` and `score_mod` can say.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import test_k1_definition as k1
import test_k2_masking as k2
import test_k5_state as k5
import test_k8_training as k8
import torch
import torch.nn.functional as F
from members import Case, assert_same, bases, shrunk, with_part
from torch import Tensor

from attention_cases import LargestTensor
from pairwise import pairwise
from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import (
    DynamicSpanConfig,
    LSHConfig,
    MemoryCompressedConfig,
    RoutingConfig,
    SoftmaxConfig,
    compressed_slots,
)
from polyformer.attention.mechanisms import pair_terms as pair_terms_module
from polyformer.attention.mechanisms.base import MechanismConfig
from polyformer.attention.mechanisms.lsh import lsh as lsh_module
from polyformer.attention.mechanisms.lsh import sorted_attention
from polyformer.attention.mechanisms.routing import interval_attention
from polyformer.attention.positions import (
    AlibiConfig,
    BoundPosition,
    DebertaConfig,
    DistanceAwareConfig,
    EtcLabelsConfig,
    Position,
    PositionConfig,
    Shape,
    ShawConfig,
    Site,
    T5BiasConfig,
    TransformerXLConfig,
)
from polyformer.attention.positions.by_distance import slopes as slopes_of
from polyformer.core.sequence.context import Context

HEADS, WIDTH = 2, 4
CHOOSING: dict[str, MechanismConfig] = {
    "lsh": LSHConfig(rounds=2, buckets=2, window=3),
    "routing": RoutingConfig(clusters=2, window=3, local_window=3),
    "memory_compressed": MemoryCompressedConfig(kernel=3, stride=2),
}
SCHEMES: dict[str, PositionConfig] = {
    "bias": T5BiasConfig(num_buckets=8, max_distance=16),
    "content": TransformerXLConfig(),
    "content-and-keys": DebertaConfig(max_relative_positions=6),
    "values": ShawConfig(clip=3),
    "scores": DistanceAwareConfig(),
}
BOTH = [(mechanism, scheme) for mechanism in CHOOSING for scheme in SCHEMES]


@functools.cache
def case_of(mechanism: str, scheme: str, shape: str = "decoder") -> Case:
    base = with_part(bases()[shape], CHOOSING[mechanism])
    return Case(f"{mechanism}-{scheme}", shrunk(with_part(base, SCHEMES[scheme])))


def position_of(config: PositionConfig, heads: int = HEADS) -> tuple[Position, Site]:
    """A scheme with random numbers in its tables."""
    torch.manual_seed(7)
    shape = Shape(hidden_size=heads * WIDTH, max_positions=64, num_heads=heads, head_size=WIDTH)
    position = config.build(shape).double().eval()
    for parameter in position.parameters():
        torch.nn.init.normal_(parameter)

    def to_heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, WIDTH)).transpose(0, 1)

    return position, Site(0, to_heads, to_heads)


def slopes(config: MechanismConfig, scheme: PositionConfig, context: Context, heads: int) -> list[Tensor]:
    """The output and the gradients of inputs, of the scheme's tables and of the mechanism's parameters."""
    *inputs, weight = k1.tensors(2, heads, 1, context.q_len, context.kv_len)
    mechanism, (position, site) = config.build(heads, WIDTH).double().eval(), position_of(scheme, heads)
    y, _ = mechanism(*inputs, k1.fresh(context, {}), None, BoundPosition(position, site))
    learned = [*inputs, *position.parameters(), *mechanism.parameters()]
    grads = torch.autograd.grad((y * weight).sum(), learned, allow_unused=True)
    return [y, *(torch.zeros_like(x) if grad is None else grad for x, grad in zip(learned, grads))]


@pytest.mark.parametrize(("few", "mechanism", "scheme"), pairwise([0, 8], list(CHOOSING), list(SCHEMES)))
def test_fast_is_the_definition(mechanism: str, scheme: str, few: int, monkeypatch: pytest.MonkeyPatch):
    """K1: whether vectors are read pair by pair or met by products, and with fewer queries than keys."""
    monkeypatch.setattr(pair_terms_module, "MAX_TABLE_RATIO", few)
    config = CHOOSING[mechanism]
    for queries, keys, heads in ((13, 13, 3), (5, 12, 2)):
        for context in k1.contexts(2, queries, keys)[1::2]:
            results = []
            for form in (config, config.definition()):
                torch.manual_seed(6)
                results.append(slopes(form, SCHEMES[scheme], context, heads))
            for actual, expected in zip(*results):
                assert_same(actual, expected)


@pytest.mark.parametrize("scheme", ["content-and-keys", "values"])
@pytest.mark.parametrize("mechanism", list(CHOOSING))
def test_tiles_one_after_another_are_all_at_once(
    mechanism: str, scheme: str, monkeypatch: pytest.MonkeyPatch
):
    """Several blocks of queries, each computed alone."""
    for module in (sorted_attention, interval_attention, compressed_slots):
        monkeypatch.setattr(module, "max_elements", lambda q, terms: 1)
    monkeypatch.setattr(compressed_slots, "BLOCK", 16)
    config, context = CHOOSING[mechanism], Context(75, 75, causal=True)
    results = []
    for form in (config, config.definition()):
        torch.manual_seed(6)
        results.append(slopes(form, SCHEMES[scheme], context, 1 if mechanism == "lsh" else 2))
    for actual, expected in zip(*results):
        assert_same(actual, expected)


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_few_queries_after_many_keys_are_looked_up(scheme: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lsh_module, "MIN_KEY_RATIO", 1)
    for queries in (1, 3):
        context = k1.contexts(2, queries, 20)[-1]
        results = []
        for form in (CHOOSING["lsh"], CHOOSING["lsh"].definition()):
            torch.manual_seed(6)
            results.append(slopes(form, SCHEMES[scheme], context, 2))
        for actual, expected in zip(*results):
            assert_same(actual, expected)


def sees_all(mechanism: str, length: int) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """A mechanism in which every token sees all others, and what it does to its queries."""
    if mechanism == "lsh":
        return LSHConfig(window=length, whole=length), lambda q: q
    if mechanism == "routing":
        whole = RoutingConfig(clusters=1, window=length, local_heads=0)
        return whole, lambda q: F.layer_norm(q, (WIDTH,))
    return MemoryCompressedConfig(kernel=1, stride=1), lambda q: q


@pytest.mark.parametrize(
    "scheme", [*SCHEMES.values(), AlibiConfig(), EtcLabelsConfig()], ids=lambda s: s.kind
)
@pytest.mark.parametrize("mechanism", list(CHOOSING))
def test_with_all_keys_it_is_softmax_attention(mechanism: str, scheme: PositionConfig):
    """The terms have the signs and factors that `attend` gives them, which has oracles of its own."""
    length = 11
    config, asked = sees_all(mechanism, length)
    q, k, v, _ = k1.tensors(2, HEADS, 1, length, length)
    context, (position, site) = Context(length, length), position_of(scheme)
    module = config.build(HEADS, WIDTH).double().eval()
    keys = {"lsh": F.normalize(k, dim=-1), "routing": F.layer_norm(k, (WIDTH,))}.get(mechanism, k)
    if mechanism == "memory_compressed":
        for kernel in module.parameters():
            kernel.data.copy_(torch.eye(WIDTH))
    y, _ = module(q, k, v, context, None, BoundPosition(position, site))
    terms, others = BoundPosition(position, site), None
    if mechanism == "lsh":
        others = lambda b, h, q_idx, kv_idx: q_idx != kv_idx  # noqa: E731
    expected = attend(
        asked(q),
        keys,
        v,
        mask_mod=others,
        score_mod=terms.score_mod(asked(q), keys, context),
        relative=terms.relative(asked(q), keys, context),
        context=Context(length, length),
        backend="definition",
    )
    assert_same(y, expected)


def test_a_compressed_key_stands_where_its_last_token_does():
    """Without content, ALiBi alone decides; and it does so in an encoder whose end cuts a slot off."""
    position, site = position_of(AlibiConfig())
    module = MemoryCompressedConfig(kernel=3, stride=3).build(HEADS, WIDTH).double().eval()
    *_, v, _ = k1.tensors(1, HEADS, 1, 8, 8)
    zero = torch.zeros_like(v)
    values = F.pad(v, (0, 0, 0, 1)).unflatten(2, (3, 3))
    values = torch.einsum("bhstd,htde->bhse", values, module.value_kernel)
    for causal, places in ((True, [0, 2, 5]), (False, [2, 5, 7])):
        y, _ = module(zero, zero, v, Context(8, 8, causal=causal), None, BoundPosition(position, site))
        own = torch.cat([v[:, :, :1], values[:, :, :2]], 2) if causal else values
        weights = (-slopes_of(HEADS)[1] * (7 - torch.tensor(places))).double().softmax(0)
        torch.testing.assert_close(y[0, 1, 7], weights @ own[0, 1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(PositionConfig.kinds))
def test_beyond_the_farthest_distance_all_is_the_same(kind: str):
    """Tables that end there say what whole ones say."""
    for config in PositionConfig.kinds[kind].examples():
        position, site = position_of(config)
        if position.farthest is None:
            continue
        far, q = position.farthest, torch.zeros(1, HEADS, 1, WIDTH, dtype=torch.float64)
        for context in (Context(2 * far + 9, 2 * far + 9), Context(2 * far + 9, 2 * far + 9, causal=True)):
            whole = position.relative(q, q, context, site)
            few = position.relative(q, q, context.within_distances((-far, far)), site)
            least, greatest = context.distances
            entry = few.entry(torch.arange(least, greatest + 1))
            assert whole.tables.keys() == few.tables.keys()
            for name, table in whole.tables.items():
                assert torch.equal(table, few.tables[name][:, entry])


CONTRACTS: list[Callable[[Case], None]] = [
    k2.test_the_future_is_not_seen,
    k2.test_gradients_come_from_the_past_alone,
    k2.test_padding_changes_nothing,
    k2.test_packed_documents_are_as_if_alone,
    k5.test_any_split_is_one_pass,
    k5.test_padding_stays_padding_in_the_state,
    k5.test_documents_stay_apart_across_chunks,
    k8.test_every_parameter_gets_a_gradient,
]


@pytest.mark.parametrize(
    ("contract", "mechanism", "scheme"),
    pairwise(CONTRACTS, list(CHOOSING), list(SCHEMES)),
    ids=lambda x: getattr(x, "__name__", x),
)
def test_contracts_of_a_decoder(mechanism: str, scheme: str, contract: Callable[[Case], None]):
    contract(case_of(mechanism, scheme))


@pytest.mark.parametrize(
    "contract", [k2.test_rows_of_different_lengths_are_as_if_alone, k8.test_every_parameter_gets_a_gradient]
)
@pytest.mark.parametrize("mechanism", list(CHOOSING))
def test_contracts_of_an_encoder(mechanism: str, contract: Callable[..., None]):
    contract(case_of(mechanism, "content-and-keys", "encoder"))


@pytest.mark.parametrize(("mechanism", "scheme"), BOTH)
def test_in_bfloat16_the_error_is_that_of_dense_attention(mechanism: str, scheme: str):
    """K11: at most twice that of softmax attention with the same positions, in outputs and gradients."""
    torch.manual_seed(15)
    rounded = [torch.randn(2, HEADS, 67, WIDTH).bfloat16() for _ in range(3)]
    errors = []
    for config in (CHOOSING[mechanism], SoftmaxConfig()):
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            torch.manual_seed(16)
            position, site = position_of(SCHEMES[scheme])
            module = config.build(HEADS, WIDTH).bfloat16().to(dtype).eval()
            inputs = [x.to(dtype).requires_grad_() for x in rounded]
            terms = BoundPosition(position.bfloat16().to(dtype), site)
            y, _ = module(*inputs, Context(67, 67, causal=True), None, terms)
            assert y.dtype == dtype
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), inputs)])
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(*results)])
    for mine, theirs in zip(*errors):
        assert mine <= 2 * theirs


@pytest.mark.parametrize(
    "config", [*CHOOSING.values(), DynamicSpanConfig(max_span=3, ramp=2)], ids=lambda c: c.kind
)
def test_what_is_not_finite_stays_with_those_who_see_it(config: MechanismConfig):
    """Relative values are added for every query, but say nothing of who sees whom."""
    torch.manual_seed(6)
    mechanism, (position, site) = config.build(HEADS, WIDTH).double().eval(), position_of(ShawConfig(clip=3))
    q, k, v, _ = (x.detach() for x in k1.tensors(1, HEADS, 1, 13, 13))
    v[:, :, 9] = torch.nan
    y, _ = mechanism(q, k, v, Context(13, 13, causal=True), None, BoundPosition(position, site))
    assert y[:, :, :9].isfinite().all()
    assert y.isnan().any()


@pytest.mark.parametrize("scheme", ["content", "values"])
@pytest.mark.parametrize("mechanism", list(CHOOSING))
def test_nothing_has_the_size_of_all_pairs(mechanism: str, scheme: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("polyformer.attention.mechanisms.pair_terms.cache_capacity", lambda like: 1 << 14)
    length, (position, site) = 1024, position_of(SCHEMES[scheme])
    q, k, v, _ = k1.tensors(1, HEADS, 1, length, length)
    module = CHOOSING[mechanism].build(HEADS, WIDTH).double().eval()
    with LargestTensor() as seen:
        y, _ = module(q, k, v, Context(length, length, causal=True), None, BoundPosition(position, site))
        y.sum().backward()
    assert seen.largest < length * length / 2
