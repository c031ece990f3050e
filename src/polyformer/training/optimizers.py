"""Optimizers of torch, and Muon, with the hyperparameters of the papers."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""p(s) = A s + B s^3 + C s^5, applied `ITERATIONS` times, maps every s in [0.01, 1] into [0.7, 1.2]."""


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


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config):
    """Base of the optimizers. `lr` is the learning rate where the factor of the schedule is 1."""

    option: ClassVar[str] = "optimizer.kind"

    lr: PositiveFloat = 1e-3

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the trainable parameters of `model`, on their device."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Adam(OptimizerConfig):
    """Adam without weight decay; the defaults are from the original Transformer."""

    kind: ClassVar[str] = "adam"
    paper: ClassVar[str] = "Kingma and Ba 2015; values of Vaswani et al. 2017, section 5.3"

    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam: m / (sqrt(v) + eps), with bias correction of both moments."""
        weights = trained(model)
        return torch.optim.Adam(weights, self.lr, self.betas, self.eps, fused=has_fused(weights))


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerConfig):
    """AdamW: Adam with decoupled weight decay of matrices; norms and biases are never decayed."""

    kind: ClassVar[str] = "adamw"
    paper: ClassVar[str] = "Loshchilov and Hutter 2019; values of Brown et al. 2020 (GPT-3), appendix B"

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # per step, times the learning rate
    decay_embeddings: bool = False  # whether embedding tables are decayed (and an output layer tied to one)

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW: Adam's update minus lr * weight_decay * w for the decayed groups."""
        groups = decay_groups(model, self.weight_decay, self.decay_embeddings)
        return torch.optim.AdamW(groups, self.lr, self.betas, self.eps, fused=has_fused(trained(model)))


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerConfig):
    """Stochastic gradient descent with momentum, optionally in Nesterov's form."""

    kind: ClassVar[str] = "sgd"

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0  # of matrices, added to their gradient
    decay_embeddings: bool = False

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD: w - lr * (momentum * velocity + gradient)."""
        groups = decay_groups(model, self.weight_decay, self.decay_embeddings)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


@dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerConfig):
    """Adafactor: a factored second moment, a row and a column per matrix, which saves memory; used for T5."""

    kind: ClassVar[str] = "adafactor"
    paper: ClassVar[str] = "Shazeer and Stern 2018"

    lr: float = 1e-2
    beta2_decay: float = -0.8  # the second moment's beta at step t is 1 - t ** beta2_decay
    clip_threshold: float = 1.0  # largest root mean square of an update
    weight_decay: float = 0.0
    decay_embeddings: bool = False

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adafactor, with updates clipped to a root mean square of `clip_threshold`."""
        groups = decay_groups(model, self.weight_decay, self.decay_embeddings)
        return torch.optim.Adafactor(groups, lr=self.lr, beta2_decay=self.beta2_decay, d=self.clip_threshold)


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimizerConfig):
    """Muon: orthogonalized updates for the matrices of layers; Adam at `adam_lr` for all other parameters."""

    kind: ClassVar[str] = "muon"
    paper: ClassVar[str] = "Jordan et al. 2024; scale and decay of Liu et al. 2025, section 2.2"

    lr: float = 1e-2
    momentum: float = 0.95
    weight_decay: float = 0.1  # of the matrices, per step, times the learning rate
    adam_lr: PositiveFloat = 4e-3
    betas: tuple[float, float] = (0.9, 0.95)  # of Adam

    def build(self, model: nn.Module) -> Muon:
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


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients, tied parameters once. Raises `InputError` for none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InputError("model: no parameter requires gradients, so there is nothing to train")
    return parameters


def has_fused(parameters: list[nn.Parameter]) -> bool:
    """Return whether torch has its fused update for all of them."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


def decay_groups(model: nn.Module, weight_decay: float, decay_embeddings: bool) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay; vectors, and by default tables, without."""
    tables = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in trained(model):
        exempt = parameter.ndim < 2 or (id(parameter) in tables and not decay_embeddings)
        (plain if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
