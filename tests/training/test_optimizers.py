"""Optimizers: the values papers give, and what is decayed."""

import pytest
import torch
from torch import nn

from polyformer.training.optimizers import Adam, AdamW, OptimizerConfig


def model() -> nn.ModuleDict:
    """A tied table, matrices, vectors, and one frozen matrix."""
    parts = nn.ModuleDict(
        {
            "table": nn.Embedding(7, 4),
            "a": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "frozen": nn.Linear(4, 4),
        }
    )
    parts["out"] = nn.Linear(4, 7)
    parts["out"].weight = parts["table"].weight
    parts["frozen"].requires_grad_(False)
    return parts


def decays(optimizer: torch.optim.Optimizer, of: nn.Module) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in of.named_parameters()}
    return {
        names[id(parameter)]: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_adam_has_the_first_transformers_values() -> None:
    optimizer = Adam(lr=1.0).build(model())
    settings = optimizer.param_groups[0]
    assert (settings["betas"], settings["eps"], settings["weight_decay"]) == ((0.9, 0.98), 1e-9, 0)


def test_adam_is_its_equation() -> None:
    weight = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    optimizer = Adam(lr=0.1).build(weight)
    expected = weight.weight.detach().clone()
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 5):
        gradient = torch.tensor([[0.3, -2.0, 0.01 * step]], dtype=torch.float64)
        weight.weight.grad = gradient.clone()
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.98 * second + 0.02 * gradient**2
        expected -= 0.1 * (first / (1 - 0.9**step)) / ((second / (1 - 0.98**step)).sqrt() + 1e-9)
        assert torch.allclose(weight.weight, expected, rtol=0, atol=1e-12)


def test_adamw_decays_matrices_only() -> None:
    parts = model()
    assert decays(AdamW(weight_decay=0.3).build(parts), parts) == {
        "table.weight": 0.0,
        "out.bias": 0.0,
        "a.weight": 0.3,
        "a.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
    }


def test_embeddings_are_decayed_on_request() -> None:
    parts = model()
    optimizer = AdamW(weight_decay=0.3, decay_embeddings=True).build(parts)
    assert decays(optimizer, parts)["table.weight"] == 0.3


@pytest.mark.parametrize("kind", sorted(OptimizerConfig.kinds))
def test_every_kind_lowers_a_loss_and_goes_to_files(kind: str) -> None:
    torch.manual_seed(0)
    config = OptimizerConfig.kinds[kind].examples()[0]
    assert isinstance(config, OptimizerConfig)
    assert OptimizerConfig.from_yaml(config.to_yaml()) == config
    layer = nn.Linear(5, 3)
    x, y = torch.randn(16, 5), torch.randn(16, 3)
    optimizer = config.build(layer)
    losses = []
    for _ in range(10):
        loss = (layer(x) - y).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
