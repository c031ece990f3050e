"""Statements of five lecture texts (docs/seeds.md) about hashing, random features and random projections."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyformer.attention.mechanisms import LSHConfig, RFAConfig
from polyformer.core.sequence.context import Context


def test_near_vectors_share_buckets():
    """The share of rounds in which two vectors share a bucket, by their angle in degrees."""
    torch.manual_seed(0)
    mechanism = LSHConfig(rounds=500, buckets=8).build(1, 16).double()
    shares = []
    for degrees in (5, 30, 60, 90, 150):
        angle = math.radians(degrees)
        pair = torch.zeros(1, 1, 2, 16, dtype=torch.float64)
        pair[0, 0, 0, 0] = 1
        pair[0, 0, 1, :2] = torch.tensor([math.cos(angle), math.sin(angle)])
        buckets = mechanism.hash(pair)
        shares.append(float((buckets[..., 0] == buckets[..., 1]).double().mean()))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8
    assert shares[-1] < 0.02


class Counted(TorchDispatchMode):
    """Counts the operations that are dispatched one after another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_more_rounds_are_more_operations_in_sequence():
    counts = []
    for rounds in (1, 2, 4, 8):
        torch.manual_seed(0)
        mechanism = LSHConfig(rounds=rounds, buckets=8, window=16).build(2, 8).eval()
        q, context = torch.randn(1, 2, 256, 8), Context(256, 256, causal=True)
        with Counted() as counted:
            mechanism(q, q, q, context, None, None)
        counts.append(counted.count)
    assert counts == sorted(counts)
    assert counts[-1] > 2 * counts[0]


def estimated_kernel(x: Tensor, y: Tensor, deviation: float, features: int) -> float:
    torch.manual_seed(0)
    w = deviation * torch.randn(features, len(x), dtype=torch.float64)
    phi_x, phi_y = (torch.cat([(w @ z).sin(), (w @ z).cos()]) / math.sqrt(features) for z in (x, y))
    return float(phi_x @ phi_y)


def test_the_kernel_has_the_variance_of_its_directions():
    """Directions of variance 1 / s^2, not s^2, give exp(-|x - y|^2 / 2 s^2); then exp(x.y / s^2) splits."""
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, dtype=torch.float64) / 3
    sigma = 2.0
    gauss = math.exp(-float((x - y).square().sum()) / (2 * sigma**2))
    assert abs(estimated_kernel(x, y, 1 / sigma, 200_000) - gauss) < 0.01
    assert abs(estimated_kernel(x, y, sigma, 200_000) - gauss) > 0.1
    norms = math.exp(float(x.square().sum() + y.square().sum()) / (2 * sigma**2))
    assert math.isclose(norms * gauss, math.exp(float(x @ y) / sigma**2), rel_tol=1e-12)


@torch.no_grad()
def test_fewer_features_than_channels_are_no_approximation():
    """The error of attention, relative to its output without the mean of the values: d = 32."""
    errors = {}
    for features in (4, 32, 512):
        total = 0.0
        for seed in range(5):
            torch.manual_seed(seed)
            q, k, v = torch.randn(3, 1, 1, 64, 32, dtype=torch.float64)
            mechanism = RFAConfig(features=features).build(1, 32).double().eval()
            y, _ = mechanism(q, k, v, Context(64, 64), None, None)
            q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
            exact = (q @ k.mT).softmax(-1) @ v
            total += float((y - exact).norm() / (exact - v.mean(2, keepdim=True)).norm()) / 5
        errors[features] = total
    assert errors[4] > 2 * errors[32] > 4 * errors[512]
    assert errors[4] > 1, "worse than the mean of all values"


def test_random_projections_keep_norms_and_products():
    """Lemma 1 with its constants corrected: failures are rarer than exp(-(e^2 - e^3) k / 4)."""
    torch.manual_seed(0)
    n, k, epsilon, draws = 64, 80, 0.5, 400
    x, y = torch.randn(2, n, dtype=torch.float64)
    r = torch.randn(draws, k, n, dtype=torch.float64) / math.sqrt(k)
    bound = math.exp(-(epsilon**2 - epsilon**3) * k / 4)
    rx, ry = r @ x, r @ y
    long = (rx.norm(dim=-1) > (1 + epsilon) * x.norm()).double().mean()
    product = ((rx * ry).sum(-1) - x @ y).abs()
    assert float(long) <= bound
    assert float((product > epsilon * x.norm() * y.norm()).double().mean()) <= 2 * bound
    assert float((product > epsilon * (x @ y).abs()).double().mean()) > 2 * bound, (
        "not relative to the product"
    )
    assert math.exp(-(epsilon**2 + epsilon**3) * k / 4) < bound, "the text's exponent promises more"


def attention_weights(n: int = 48, d: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, n, d, dtype=torch.float64)
    scores = q @ k.T / math.sqrt(d)
    return scores, scores.softmax(-1)


def test_the_projected_matrix_has_rank_k():
    _, p = attention_weights()
    r = torch.randn(7, 48, dtype=torch.float64) / math.sqrt(7)
    assert int(torch.linalg.matrix_rank(p @ r.T @ r)) <= 7


def test_scores_have_at_most_the_rank_of_a_head():
    """And their exponentials do not."""
    scores, p = attention_weights()
    assert int(torch.linalg.matrix_rank(scores)) == 4
    assert int(torch.linalg.matrix_rank(p)) > 20


def test_norms_are_ordered_as_in_the_proof():
    torch.manual_seed(0)
    for _ in range(20):
        a, x = torch.randn(6, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
        spectral = torch.linalg.matrix_norm(a, 2)
        assert (a @ x).norm() <= spectral * x.norm()
        assert spectral <= a.norm()
        assert torch.isclose(spectral, torch.linalg.eigvalsh(a.T @ a)[-1].sqrt())


@pytest.mark.parametrize(("k", "epsilon"), [(16, 0.3), (64, 0.2), (64, 0.4)])
def test_random_rows_keep_lengths_with_the_stated_probability(k: int, epsilon: float):
    """Pr[|R x| > (1 + e)|x|] is far below exp(-(e^2 - e^3) k / 4), for R [k, n] of variance 1 / k."""
    generator, draws = torch.Generator().manual_seed(0), 4000
    x = torch.randn(20, generator=generator)
    lengths = torch.stack(
        [(torch.randn(k, 20, generator=generator) / k**0.5 @ x).norm() for _ in range(draws)]
    )
    longer = float((lengths > (1 + epsilon) * x.norm()).float().mean())
    bound = math.exp(-(epsilon**2 - epsilon**3) * k / 4)
    assert longer < bound / 4
    assert float((lengths > x.norm()).float().mean()) > 0.4  # half of all lengths grow: the bound needs e > 0
