"""Muon, with one update for all matrices of a shape; and Adam for the other parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import _foreach_add as foreach_add  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_add_ as foreach_add_  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_mul_ as foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.optim.adamw import adamw

from polyformer.core.host_values import tensor_on

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""p(s) = A s + B s^3 + C s^5, applied `ITERATIONS` times, maps every s in [0.01, 1] into [0.7, 1.2]."""

NUMBERS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers in the matrices that are orthogonalized together: few enough for the cache of a CPU, and enough to
occupy a GPU; a batch needs three times its memory."""


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalized updates of the matrices in groups with `orthogonal`; Adam for the others.

        M <- mu M + G,   U = G + mu M,   W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonal(U)

    for the gradient G of a matrix W [m, n]. orthogonal(U) = (U U^T)^(-1/2) U: all its singular values are 1,
    so that a step is not dominated by a few directions. With the factor 0.2 sqrt(max(m, n)) the entries of a
    step are about as large as for Adam, so that the learning rates of Adam can be used. Jordan et al. 2024;
    Liu et al. 2025, equation 4.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, betas: tuple[float, float]):
        super().__init__(groups, {"momentum": momentum, "betas": betas, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                update = self._muon if group["orthogonal"] else self._adam
                update(parameters, group)
        return loss

    def _muon(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update matrices, those of a shape together; a sharded matrix is updated by itself."""
        groups: dict[Any, list[Tensor]] = {}
        for parameter, shard in zip(parameters, _local_shards(parameters)):
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            key = (parameter.shape, parameter.dtype) if shard is parameter else id(parameter)
            groups.setdefault(key, []).append(parameter)
        for matrices in groups.values():
            most = max(1, NUMBERS.get(matrices[0].device.type, 1) // matrices[0].numel())
            for start in range(0, len(matrices), most):
                self._update(matrices[start : start + most], group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of the same shape."""
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        gradients = _gradients(matrices)
        foreach_mul_(momenta, group["momentum"])
        foreach_add_(momenta, gradients)
        updates = foreach_add(gradients, momenta, alpha=group["momentum"])
        several = len(matrices) > 1
        steps = orthogonal(torch.stack(updates)).unbind() if several else [orthogonal(*updates)]
        foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        foreach_add_(matrices, steps, alpha=-group["lr"] * 0.2 * max(matrices[0].shape) ** 0.5)

    def _adam(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters by torch's AdamW, all of them by one kernel where it is fused."""
        memories = [self.state[parameter] for parameter in parameters]
        for parameter, memory in zip(parameters, memories):
            if not memory:
                memory.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
        # torch counts the steps in tensors, which it changes in place.
        steps = tensor_on([float(memory["step"]) for memory in memories], parameters[0].device)
        for memory in memories:
            memory["step"] += 1
        adamw(
            _local_shards(parameters),
            _local_shards(_gradients(parameters)),
            _local_shards([memory["mean"] for memory in memories]),
            _local_shards([memory["square"] for memory in memories]),
            [],
            list(steps.unbind()),
            fused=has_fused(parameters),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def has_fused(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether torch has its fused update for all of them."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters that have them."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _local_shards(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the shards of this process, without a copy; a tensor that is not sharded is returned itself."""
    if not torch.distributed.is_initialized():
        return list(tensors)
    from polyformer.training.distributed.collectives import local_shard

    return [local_shard(tensor) for tensor in tensors]


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with orthonormal rows or columns, up to 30 % in each singular value.

    matrices: a matrix [m, n] or several [N, m, n]. A sharded matrix is gathered in every process, which
    computes all of it and keeps its shard. Only a single matrix is gathered at once.

    A Newton-Schulz iteration: s -> p(s) for every singular value s, only by matrix products,
    X <- A X + (B X X^T + C (X X^T)^2) X, started at matrix / ||matrix||.
    """
    if torch.distributed.is_initialized():
        from polyformer.training.distributed.full_state_dict import apply_to_full_tensor

        return apply_to_full_tensor(_orthogonal, matrices)
    return _orthogonal(matrices)


def _orthogonal(matrices: Tensor) -> Tensor:
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x if wide else x.mT
