"""Performer and RFA: their limits, their errors, their states, and faults seen in public code."""

import math

import pytest
import torch
from torch import Tensor

import polyformer
from pairwise import pairwise
from polyformer.attention.mechanisms import PerformerConfig, RFAConfig
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig
from polyformer.attention.mechanisms.linear import passes, sums
from polyformer.attention.mechanisms.linear.feature_attention import LinearState
from polyformer.attention.mechanisms.linear.feature_maps import MAPS, Kernel
from polyformer.attention.mechanisms.random_directions import RandomDirections, directions
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context

MEMBERS: list[MechanismConfig] = [
    PerformerConfig(features=24),
    PerformerConfig(features=24, map="trigonometric"),
    PerformerConfig(features=24, map="relu"),
    RFAConfig(features=24),
    RFAConfig(features=24, gated=True),
]


def build(config: MechanismConfig, seed: int = 0, heads: int = 2, width: int = 8) -> Mechanism:
    torch.manual_seed(seed)
    return config.build(heads, width).double().eval()


def tensors(length: int, rows: int = 2, width: int = 8) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(rows, 2, length, width, dtype=torch.float64) for _ in range(3)]


def run(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, causal: bool = True, **more: Tensor) -> Tensor:
    return mechanism(q, k, v, Context(q.shape[2], k.shape[2], causal=causal, **more), None, None)[0]


def test_positive_features_are_those_of_the_paper():
    """phi(q) . phi(k) summed key by key, as lemma 2 writes it, causally and by hand."""
    mechanism, (q, k, v) = build(PerformerConfig(features=6)), tensors(5)
    w = mechanism.get_submodule("directions")(q)
    scaled_q, scaled_k = (x * 8**-0.25 for x in (q, k))

    def phi(x: Tensor) -> Tensor:
        return torch.exp(x @ w.T - x.square().sum(-1, keepdim=True) / 2) / math.sqrt(6)

    expected = torch.empty_like(v)
    for i in range(5):
        seen = (phi(scaled_q[:, :, i : i + 1]) * phi(scaled_k[:, :, : i + 1])).sum(-1, keepdim=True)
        expected[:, :, i] = (seen * v[:, :, : i + 1]).sum(2) / seen.sum(2)
    torch.testing.assert_close(run(mechanism, q, k, v), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_a_floor_the_estimate_is_raw(causal: bool, dtype: torch.dtype):
    """Denominators of features with signs may be negative: the ratio is then what the equation says."""
    config = PerformerConfig(features=3, map="trigonometric", floor=0.0)
    mechanism = build(config).to(dtype)
    q, k, v = (tensor.to(dtype) for tensor in tensors(150))
    w = mechanism.get_submodule("directions")(q)
    a, b = (x * 8**-0.25 @ w.T for x in (q, k))
    weight = (k.square().sum(-1) * 8**-0.5 / 2).exp().unsqueeze(-2)
    scores = (a.cos() @ b.cos().mT + a.sin() @ b.sin().mT) * weight
    scores = scores.tril() if causal else scores
    total = scores.sum(-1, keepdim=True)
    assert (total < 0).any()
    expected = scores @ v / total
    sure = total.squeeze(-1).abs() > 1e-2 * scores.abs().sum(-1)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-2
    for form in (mechanism, build(config.definition()).to(dtype)):
        y = run(form, q, k, v, causal=causal)
        torch.testing.assert_close(y[sure], expected[sure], rtol=tolerance, atol=tolerance)


def test_gates_are_the_recurrence_of_the_paper():
    """S = g S + (1 - g) phi(k) v^T and z likewise, one token after the other."""
    mechanism, (q, k, v) = build(RFAConfig(features=40, gated=True)), tensors(150)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    named = dict(mechanism.named_parameters())
    w, sigma = mechanism.get_submodule("directions")(q), named["log_sigma"].exp().view(-1, 1)
    s, z = torch.zeros(2, 2, 80, 8, dtype=torch.float64), torch.zeros(2, 2, 80, dtype=torch.float64)
    expected = []
    for t in range(150):
        gate = torch.sigmoid((k[:, :, t] * named["gate.vector"]).sum(-1) + named["gate.bias"]).unsqueeze(-1)
        angles_q, angles_k = (
            x[:, :, t] / x[:, :, t].norm(dim=-1, keepdim=True) / sigma @ w.T for x in (q, k)
        )
        of_q, of_k = (torch.cat([x.sin(), x.cos()], -1) / math.sqrt(40) for x in (angles_q, angles_k))
        s = gate.unsqueeze(-1) * s + ((1 - gate) * of_k).unsqueeze(-1) * v[:, :, t].unsqueeze(2)
        z = gate * z + (1 - gate) * of_k
        expected.append((of_q.unsqueeze(2) @ s).squeeze(2) / (of_q * z).sum(-1, keepdim=True))
    torch.testing.assert_close(run(mechanism, q, k, v), torch.stack(expected, 2), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def limit_error(config: MechanismConfig, unit: bool) -> float:
    """Mean square distance from softmax attention, over seeds."""
    q, k, v = (x / 2 for x in tensors(24))
    if unit:
        unit_q, unit_k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        expected = torch.softmax(unit_q @ unit_k.mT, -1) @ v
    else:
        expected = torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v
    estimates = [run(build(config, seed), q, k, v, causal=False) for seed in range(12)]
    return float(torch.stack([(estimate - expected).square().mean() for estimate in estimates]).mean())


@pytest.mark.parametrize(
    "config",
    [PerformerConfig(features=32), PerformerConfig(features=32, map="trigonometric"), RFAConfig(features=32)],
    ids=["positive", "trigonometric", "rfa"],
)
def test_more_features_come_nearer_to_softmax_at_the_rate_of_a_mean(config: PerformerConfig | RFAConfig):
    """The square of the error falls as 1 / M: 64 times as many features, an error 8 times less."""
    from dataclasses import replace

    few, many = (limit_error(replace(config, features=m), config.kind == "rfa") for m in (32, 32 * 64))
    assert 64 / 2.5 < few / many < 64 * 2.5


@pytest.mark.parametrize("name", ["positive", "trigonometric"])
def test_orthogonal_directions_err_less_than_independent_ones(name: str):
    errors = {kind: kernel_error(name, kind) for kind in (True, False)}
    assert errors[True] < 0.95 * errors[False]


def test_positive_features_err_less_than_trigonometric_ones_where_kernels_are_small():
    """Lemma 2: that is where most weights of attention are."""
    positive, trigonometric = (kernel_error(name, True, apart=1.5) for name in ("positive", "trigonometric"))
    assert positive < 0.1 * trigonometric


def kernel_error(name: str, orthogonal: bool, apart: float = 0.0) -> float:
    """Mean square error of exp(q . k), over seeds; q and k lie `apart` on either side of the origin."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(48, 8, dtype=torch.float64, generator=generator) / 6 for _ in range(2))
    q[:, 0] += apart
    k[:, 0] -= apart
    total = 0.0
    for seed in range(30):
        w = directions(64, 8, orthogonal, torch.Generator().manual_seed(seed))
        kernel = Kernel(MAPS[name], w)
        (of_q, a), (of_k, b) = kernel.features(q), kernel.features(k)
        estimate = (of_q @ of_k.T) * (a.unsqueeze(1) + b).exp()
        total += float((estimate - (q @ k.T).exp()).square().mean())
    return total


def test_directions_are_orthogonal_in_blocks_and_as_long_as_normal_ones():
    w = directions(4000, 8, True, torch.Generator().manual_seed(0))
    products = w[:8] @ w[:8].T
    torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-12)
    assert abs(float(w.square().sum(1).mean()) / 8 - 1) < 0.05
    assert abs(float(w.mean())) < 0.02
    torch.testing.assert_close(w.T @ w / 4000, torch.eye(8, dtype=torch.float64), rtol=0, atol=0.08)


@pytest.mark.parametrize("config", MEMBERS, ids=str)
def test_the_stabiliser_does_not_see_the_future(config: MechanismConfig):
    """Public code takes one maximum over all keys: a huge key in the future then empties the past."""
    mechanism, (q, k, v) = build(config), tensors(200)
    expected = run(mechanism, q, k, v)
    k, v, q = k.clone(), v.clone(), q.clone()
    k[:, :, 70:] *= 1e4
    q[:, :, 70:] *= 1e4
    v[:, :, 70:] = 1e30
    result = run(mechanism, q, k, v)
    torch.testing.assert_close(result[:, :, :70], expected[:, :, :70], rtol=0, atol=1e-12)
    assert result.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("config", MEMBERS, ids=str)
def test_padding_is_in_no_denominator_and_no_stabiliser(config: MechanismConfig, causal: bool):
    mechanism, (q, k, v) = build(config), tensors(140)
    expected = run(mechanism, q, k, v, causal)
    around = [torch.full((2, 2, size, 8), 1e3, dtype=torch.float64) for size in (5, 9)]
    q, k, v = (torch.cat([around[0], x, around[1]], 2) for x in (q, k, v))
    valid = torch.zeros(2, 154, dtype=torch.bool)
    valid[:, 5:145] = True
    result = run(mechanism, q, k, v, causal, kv_valid=valid)[:, :, 5:145]
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("config", MEMBERS, ids=str)
def test_the_state_has_one_size(config: MechanismConfig):
    mechanism, (q, k, v) = build(config), tensors(180)
    expected, state, sizes, outs, start = run(mechanism, q, k, v), mechanism.new_state(0), set(), [], 0
    for size in (130, 1, 1, 47, 1):
        part = [x[:, :, start : start + size] for x in (q, k, v)]
        start += size
        y, state = mechanism(*part, Context(size, start, causal=True), state, None)
        assert isinstance(state, LinearState)
        assert state.sums is not None
        sizes.add(tuple(state.sums.shape))
        outs.append(y)
    assert len(sizes) == 1
    torch.testing.assert_close(torch.cat(outs, 2), expected, rtol=1e-10, atol=1e-10)


def test_features_are_drawn_anew_in_training_alone_and_the_same_each_time():
    def steps(mechanism: Mechanism, count: int) -> list[Tensor]:
        seen = []
        for _ in range(count):
            q, k, v = (x.requires_grad_() for x in tensors(4))
            y = run(mechanism, q, k, v)
            seen.append(mechanism.get_submodule("directions")(q).clone())
            if mechanism.training:
                y.sum().backward()
        return seen

    config = PerformerConfig(features=8, redraw_every=2)
    first, second = build(config).train(), build(config).train()
    draws = steps(first, 4)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    assert torch.equal(draws[2], draws[3])
    for a, b in zip(draws[:3], steps(second, 3)):
        assert torch.equal(a, b)
    third = build(config, seed=5).train()
    third.load_state_dict(second.state_dict())
    assert torch.equal(steps(third, 2)[1], steps(second, 2)[1])
    evaluated = steps(first.eval(), 4)
    assert all(torch.equal(evaluated[0], draw) for draw in evaluated)


@pytest.mark.parametrize(
    ("causal", "cache", "config"), pairwise([True, False], [1 << 9, 1 << 12, 1 << 24], MEMBERS)
)
def test_the_lengths_of_runs_change_rounding_alone(
    config: MechanismConfig, cache: int, causal: bool, monkeypatch: pytest.MonkeyPatch
):
    """Outputs and gradients are those of the definition, whatever a core's cache holds."""
    monkeypatch.setattr(sums, "LEAST_RUN", 3)
    monkeypatch.setattr(passes, "RUN", 16)
    monkeypatch.setattr(sums, "cache_capacity", lambda like: cache // 8)
    results = []
    for form in (config, config.definition()):
        inputs = [x.requires_grad_() for x in tensors(37)]
        valid = torch.ones(2, 37, dtype=torch.bool)
        valid[1, :9] = False
        mechanism = build(form)
        y = run(mechanism, *inputs, causal=causal, kv_valid=valid)[:, :, 9:]
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        results.append([y.detach(), *(x.grad for x in inputs), *(p.grad for p in mechanism.parameters())])
    for fast, slow in zip(*results):
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


def test_drawing_leaves_the_global_random_state_alone():
    directions = RandomDirections(16, 8, redraw_every=1)
    before = torch.get_rng_state()
    directions(torch.zeros(1))
    directions.origin[1] += 1
    directions(torch.zeros(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerformerConfig(features=0), "features: expected 1 or more, got 0"),
        (lambda: RFAConfig(features=0), "features: expected 1 or more"),
        (lambda: PerformerConfig(redraw_every=0), "redraw_every: expected 1 or more"),
        (lambda: PerformerConfig(floor=-1.0), "floor: expected 0 or more"),
        (lambda: RFAConfig(sigma=0.0), "sigma: expected a number above 0"),
        (lambda: RFAConfig(floor=-1.0), "floor: expected 0 or more"),
    ],
)
def test_bad_numbers_are_refused_by_name(make, message: str):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    "config", [PerformerConfig(features=16), RFAConfig(features=16, gated=True)], ids=str
)
def test_a_decoder_learns(config: MechanismConfig):
    torch.manual_seed(0)
    model = polyformer.create_model(
        "decoder-tiny", attention=config, vocab_size=11, hidden_size=32, num_hidden_layers=1, dropout=0.0
    )
    ids = torch.arange(24).remainder(11).expand(2, -1)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
