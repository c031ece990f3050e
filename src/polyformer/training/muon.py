"""Muon: momentum with orthogonalized updates of each matrix; Adam for all other parameters.

    M <- mu M + G,   U = G + mu M,   W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonal(U)

for the gradient G of a matrix W [m, n]. orthogonal(U) = (U U^T)^(-1/2) U: all its singular values are 1, so
that a step is not dominated by a few directions. With the factor 0.2 sqrt(max(m, n)) the entries of a step
are about as large as for Adam, so that the learning rates of Adam can be used. Jordan et al. 2024; Liu et al.
2025, equation 4.
"""

from typing import Any

import torch
from torch import Tensor

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""p(s) = A s + B s^3 + C s^5, applied `ITERATIONS` times, maps every s in [0.01, 1] into [0.7, 1.2]."""


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
