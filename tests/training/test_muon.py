"""Muon: what it makes of a gradient's singular values, its equation, and which parameters are Adam's."""

import pytest
import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.training.optimizers import MuonConfig, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_singular_values_become_about_1_and_their_vectors_stay(shape: tuple[int, int]):
    torch.manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag(torch.linspace(0.1, 3.0, len(s), dtype=torch.float64)) @ v
    inner = u.T @ orthogonal(matrix) @ v.T
    values = inner.diagonal()
    assert torch.allclose(inner, values.diag(), rtol=0, atol=1e-9)
    assert values.min() > 0.65
    assert values.max() < 1.2


def test_zeros_stay_zeros():
    assert not orthogonal(torch.zeros(3, 5)).any()


def test_muon_is_its_equation():
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    optimizer = MuonConfig(lr=0.1, momentum=0.9, weight_decay=0.5).build(layer)
    expected, momentum = layer.weight.detach().clone(), torch.zeros(4, 6, dtype=torch.float64)
    for _ in range(3):
        gradient = torch.randn(4, 6, dtype=torch.float64)
        layer.weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.9 * momentum + gradient
        step = orthogonal(gradient + 0.9 * momentum) * 0.2 * 6**0.5
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * step
        assert torch.allclose(layer.weight, expected, rtol=0, atol=1e-12)


def test_tables_and_vectors_are_adams():
    parts = nn.ModuleDict({"table": nn.Embedding(7, 4), "a": nn.Linear(4, 4), "out": nn.Linear(4, 7)})
    parts["out"].weight = parts["table"].weight
    optimizer = MuonConfig(lr=0.1, adam_lr=0.01).build(parts)
    matrices, rest = optimizer.param_groups
    assert [id(parameter) for parameter in matrices["params"]] == [id(parts["a"].weight)]
    assert {len(rest["params"]), rest["lr"], rest["weight_decay"]} == {3, 0.01, 0.0}
    reference = torch.optim.Adam([parts["table"].weight.detach().clone().requires_grad_()], 0.01, (0.9, 0.95))
    for _ in range(3):
        gradient = torch.randn(7, 4)
        parts["table"].weight.grad = gradient.clone()
        reference.param_groups[0]["params"][0].grad = gradient.clone()
        optimizer.step()
        reference.step()
    expected = reference.param_groups[0]["params"][0]
    assert torch.allclose(parts["table"].weight, expected, rtol=0, atol=1e-6)


def test_a_rate_of_zero_is_refused():
    with pytest.raises(InputError, match=r"adam_lr: expected a number above 0, got 0"):
        MuonConfig(adam_lr=0.0)
