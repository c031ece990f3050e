"""Muon: momentum with orthogonalized updates of each matrix; Adam for all other parameters.

    M <- mu M + G,   U = G + mu M,   W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonal(U)

for the gradient G of a matrix W [m, n]. orthogonal(U) = (U U^T)^(-1/2) U: all its singular values are 1, so
that a step is not dominated by a few directions. With the factor 0.2 sqrt(max(m, n)) the entries of a step
are about as large as for Adam, so that the learning rates of Adam can be used. Jordan et al. 2024; Liu et al.
2025, equation 4.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.training.optimizers import OptimizerConfig, trained

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""p(s) = A s + B s^3 + C s^5, applied `ITERATIONS` times, maps every s in [0.01, 1] into [0.7, 1.2]."""


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon: orthogonalized updates for the matrices of layers; Adam at `adam_lr` for all other parameters."""

    kind: ClassVar[str] = "muon"
    paper: ClassVar[str] = "Jordan et al. 2024; scale and decay of Liu et al. 2025, section 2.2"

    lr: float = 1e-2
    momentum: float = 0.95
    weight_decay: float = 0.1  # of the matrices, per step, times the learning rate
    adam_lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.95)  # of Adam

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.adam_lr > 0:
            raise InputError(f"adam_lr: expected a number above 0, got {self.adam_lr}")

    def build(self, model: nn.Module) -> "Muon":
        """Return the optimizer; for a model without matrices except embedding tables it is plain Adam."""
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for parameter in trained(model):
            is_matrix = parameter.ndim == 2 and id(parameter) not in tables
            (matrices if is_matrix else rest).append(parameter)
        groups: list[dict[str, Any]] = [
            {"params": matrices, "orthogonal": True, "lr": self.lr, "weight_decay": self.weight_decay},
            {"params": rest, "orthogonal": False, "lr": self.adam_lr, "weight_decay": 0.0},
        ]
        return Muon([group for group in groups if group["params"]], self.momentum, self.betas)


class Muon(torch.optim.Optimizer):
    """An optimizer that updates groups with `orthogonal` by Muon and the others by Adam."""

    def __init__(self, groups: list[dict[str, Any]], momentum: float, betas: tuple[float, float]):
        super().__init__(groups, {"momentum": momentum, "betas": betas, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            update = self._muon if group["orthogonal"] else self._adam
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update(parameter, parameter.grad, group), alpha=-group["lr"])
        return loss

    def _muon(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        memory = self.state[parameter]
        if not memory:
            memory["momentum"] = torch.zeros_like(parameter)
        momentum = memory["momentum"].mul_(group["momentum"]).add_(gradient)
        step = orthogonal(gradient.add(momentum, alpha=group["momentum"]))
        return step.mul_(0.2 * max(parameter.shape) ** 0.5)

    def _adam(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        memory, (beta1, beta2) = self.state[parameter], group["betas"]
        if not memory:
            memory.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        memory["step"] += 1
        mean = memory["mean"].lerp_(gradient, 1 - beta1) / (1 - beta1 ** memory["step"])
        square = memory["square"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2 ** memory["step"])
        return mean.div_(square.sqrt_().add_(group["eps"]))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows or columns, up to 30 % in each singular value.

    A sharded matrix is gathered in every process, which computes all of it and keeps its shard. Only a single
    matrix is gathered at once.

    A Newton-Schulz iteration: s -> p(s) for every singular value s, only by matrix products,
    X <- A X + (B X X^T + C (X X^T)^2) X, started at matrix / ||matrix||.
    """
    if torch.distributed.is_initialized():
        from polyformer.training.distributed.full_state_dict import apply_to_full_tensor

        return apply_to_full_tensor(_orthogonal, matrix)
    return _orthogonal(matrix)


def _orthogonal(matrix: Tensor) -> Tensor:
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = A * x + torch.addmm(gram, gram, gram, beta=B, alpha=C) @ x
    return x if wide else x.T
