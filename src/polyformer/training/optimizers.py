"""Configurations of the optimizers of torch and of Muon, with the hyperparameters of the papers."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveFloat
from polyformer.training.muon import Muon, has_fused


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
