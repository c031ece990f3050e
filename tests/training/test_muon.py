"""Muon: what it makes of a gradient's singular values, its equation, and which parameters are Adam's."""

import pytest
import torch
from torch import nn

from polyformer.training.optimizers import NUMBERS, MuonConfig, orthogonal


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


@pytest.mark.parametrize("numbers", [1, 50, 1 << 20])
def test_matrices_of_a_shape_are_updated_together(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NUMBERS, "cpu", numbers)
    torch.manual_seed(0)
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5), (4, 6), (5, 5)]
    together = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in together]
    config = MuonConfig(lr=0.1, weight_decay=0.5)
    models = [nn.ParameterList(together), *(nn.ParameterList([parameter]) for parameter in alone)]
    optimizers = [config.build(model) for model in models]
    for step in range(3):
        for index, (parameter, own) in enumerate(zip(together, alone)):
            has_gradient = index != 2 or step != 1  # a parameter may miss a step
            parameter.grad = torch.randn_like(parameter) if has_gradient else None
            own.grad = None if parameter.grad is None else parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for parameter, own in zip(together, alone):
            assert torch.allclose(parameter, own, rtol=0, atol=1e-12)


def test_a_state_of_adam_is_continued() -> None:
    """The number of steps is a Python number in a checkpoint, and each parameter has its own."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2)]
    model, own = nn.ParameterList(parameters), [nn.Parameter(p.detach().clone()) for p in parameters]
    references = [torch.optim.Adam([parameter], 4e-3, (0.9, 0.95)) for parameter in own]
    state = None
    for step in range(4):
        optimizer = MuonConfig().build(model)
        if state is not None:
            optimizer.load_state_dict(state)
        for index, (parameter, copy, adam) in enumerate(zip(parameters, own, references)):
            parameter.grad = None if index and step < 2 else torch.randn_like(parameter)
            copy.grad = None if parameter.grad is None else parameter.grad.clone()
            adam.step()
        optimizer.step()
        state = optimizer.state_dict()
    assert state is not None
    assert [memory["step"] for memory in state["state"].values()] == [4, 2]
    for parameter, copy in zip(parameters, own):
        assert torch.allclose(parameter, copy, rtol=0, atol=1e-12)


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
