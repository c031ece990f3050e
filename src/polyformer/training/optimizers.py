"""Optimizers and schedules: how a gradient g becomes an update of the weights w, and the learning rate of a
step.

    adam          w <- w - lr m / (sqrt(v) + eps)                    m, v: bias-corrected means of g and g^2
    adamw         w <- (1 - lr decay) w - lr m / (sqrt(v) + eps)     for matrices; vectors are not decayed
    sgd           u <- momentum u + g,   w <- w - lr u
    adafactor     as adam, with v of a matrix from a row and a column of means
    muon          W <- (1 - lr decay) W - lr 0.2 sqrt(max(m, n)) orthogonal(G + mu M)     for matrices [m, n]

    constant      1
    linear        1 - (1 - floor) progress
    cosine        floor + (1 - floor) (1 + cos(pi progress)) / 2
    inverse-sqrt  sqrt(warmup / step)
    noam          hidden_size^-0.5 min(step^-0.5, step warmup^-1.5)

A schedule is a pure function of the step: `factor(step, steps)` multiplies the optimizer's `lr` at update
number `step` (the first is 1) of `steps`. There is no state to save or restore. As a torch scheduler:
`LambdaLR(optimizer, lambda done: schedule.factor(done + 1, steps))`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch import _foreach_add as foreach_add  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_add_ as foreach_add_  # pyright: ignore[reportPrivateImportUsage]
from torch import _foreach_mul_ as foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
from torch.optim.adamw import adamw

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import tensor_on
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat

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
    from polyformer.training.distributed.fully_sharded import local_shard

    return [local_shard(tensor) for tensor in tensors]


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest matrices with orthonormal rows or columns, up to 30 % in each singular value.

    matrices: a matrix [m, n] or several [N, m, n]. A sharded matrix is gathered in every process, which
    computes all of it and keeps its shard. Only a single matrix is gathered at once.

    A Newton-Schulz iteration: s -> p(s) for every singular value s, only by matrix products,
    X <- A X + (B X X^T + C (X X^T)^2) X, started at matrix / ||matrix||.
    """
    if torch.distributed.is_initialized():
        from polyformer.training.distributed.fully_sharded import apply_to_full_tensor

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
        # torch's fused SGD (2.13) takes neither sharded weights nor weights without momentum.
        return torch.optim.SGD(groups, self.lr, self.momentum, nesterov=self.nesterov)


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
        tables = embedding_tables(model)
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


def embedding_tables(model: nn.Module) -> set[int]:
    """Return the ids of the embedding tables in `model`."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def decay_groups(model: nn.Module, weight_decay: float, decay_embeddings: bool) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay; vectors, and by default tables, without."""
    tables = embedding_tables(model)
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in trained(model):
        exempt = parameter.ndim < 2 or (id(parameter) in tables and not decay_embeddings)
        (plain if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """Base of the schedules: a linear warm-up over the first `warmup` steps, then `decay`."""

    option: ClassVar[str] = "schedule.kind"

    warmup: NonNegativeInt = 0  # steps until the factor is 1

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of `lr` at update `step` (1 is the first) of `steps`."""
        return step / self.warmup if step < self.warmup else self.decay(step, steps)

    def decay(self, step: int, steps: int) -> float:
        """Return the factor at a `step` after the warm-up."""
        raise NotImplementedError

    def progress(self, step: int, steps: int) -> float:
        """Return the completed fraction of the steps after the warm-up: 1 from the last step on."""
        return min(1.0, (step - self.warmup) / max(1, steps - self.warmup))


@dataclass(frozen=True, kw_only=True)
class Constant(ScheduleConfig):
    """Constant schedule: the learning rate stays at `lr` after the warm-up."""

    kind: ClassVar[str] = "constant"

    def decay(self, step: int, steps: int) -> float:
        """Return 1 at every step."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class DecayToFloor(ScheduleConfig):
    """Base of the schedules that end at `floor` times the peak."""

    floor: UnitFloat = 0.0  # factor at the last step


@dataclass(frozen=True, kw_only=True)
class Linear(DecayToFloor):
    """Linear schedule: the learning rate decays linearly to `floor` of its peak."""

    kind: ClassVar[str] = "linear"
    paper: ClassVar[str] = "Devlin et al. 2019 (BERT), A.2"

    def decay(self, step: int, steps: int) -> float:
        """Return 1 - (1 - floor) * progress."""
        return 1.0 - (1.0 - self.floor) * self.progress(step, steps)


@dataclass(frozen=True, kw_only=True)
class Cosine(DecayToFloor):
    """Cosine schedule: the learning rate decays along half a cosine to `floor` of its peak."""

    kind: ClassVar[str] = "cosine"
    paper: ClassVar[str] = "Loshchilov and Hutter 2017 (SGDR), equation 5, one period"

    floor: UnitFloat = 0.1

    def decay(self, step: int, steps: int) -> float:
        """Return floor + (1 - floor) * (1 + cos(pi * progress)) / 2."""
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * self.progress(step, steps)))


@dataclass(frozen=True, kw_only=True)
class InverseSquareRoot(ScheduleConfig):
    """Inverse square root: the learning rate rises linearly, then decays as 1 / sqrt(step).

    min(step / warmup, sqrt(warmup / step)): `lr` is the peak, reached at step `warmup`.
    """

    kind: ClassVar[str] = "inverse-sqrt"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 5.3, equation 3, divided by its peak"

    warmup: int = 4000

    def decay(self, step: int, steps: int) -> float:
        """Return sqrt(warmup / step)."""
        return math.sqrt(max(1, self.warmup) / step)


@dataclass(frozen=True, kw_only=True)
class Noam(ScheduleConfig):
    """Noam schedule: linear warm-up, then 1 / sqrt(step), scaled by the hidden size.

    hidden_size^-0.5 * min(step^-0.5, step * warmup^-1.5): the learning rate of the paper if `lr` is 1.
    """

    kind: ClassVar[str] = "noam"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 5.3, equation 3"

    hidden_size: PositiveInt
    warmup: PositiveInt = 4000

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return an example with a hidden size, which has no default."""
        return (cls(hidden_size=512),)

    def factor(self, step: int, steps: int) -> float:
        """Return the learning rate of the paper, which includes the warm-up."""
        return self.hidden_size**-0.5 * min(step**-0.5, step * self.warmup**-1.5)
