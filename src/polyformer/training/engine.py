"""Execution of the passes on whole models: device, processes, precision, compilation. Built on `accelerate`.

This engine is for a single process, or for several with a whole model each. The engines of models that are
divided among processes are in `polyformer.training.distributed.mesh_engine`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polyformer.core.files import write_tensors
from polyformer.core.host_values import batch_to_device, drop_full_mask
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.state import State
from polyformer.models.initialization import Draw
from polyformer.nn.stack import Stack
from polyformer.training.checkpoint import Checkpoints, CheckpointWriter, open_writer
from polyformer.training.config import EngineConfig
from polyformer.training.launcher import rank, world
from polyformer.training.machine import (
    autocast,
    choose_device,
    choose_precision,
    machine,
    open_accelerator,
)
from polyformer.training.optimizers import OptimizerConfig
from polyformer.training.run_control import SignalRequests
from polyformer.training.state import Progress, Snapshot
from polyformer.training.task import Batch, EvaluationGroup, StepBatches, TrainingTask


def is_main() -> bool:
    """Return whether this process is the first or only process of its run; available before the engine."""
    return rank() == 0


class Engine:
    """A process of a run with a whole model, started directly or by `accelerate launch` or `torchrun`.

    Mixed precision uses torch's autocast around the loss instead of the option of accelerate, which would
    patch the caller's model and convert its outputs (all logits) back to float32.
    """

    whole: ClassVar[bool] = True
    """Whether every process has the whole model."""

    def __init__(self, config: EngineConfig) -> None:
        device, self.config = choose_device(config.device), config
        config.parallel.sizes(world())  # before the processes wait for each other
        self.accelerator = open_accelerator(device.type, config.timeout)
        self.device = self.accelerator.device
        self.precision = choose_precision(config.precision, self.device)
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.data_rank, self.data_world = self.rank, self.world
        """The place of this process among the processes, or groups of them, that read separate batches."""
        self.seed_rank = self.rank
        """The rank for random seeds. Processes that compute the same values draw the same numbers."""
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.wrapped: nn.Module = nn.Identity()

    @property
    def evaluation_group(self) -> EvaluationGroup:
        """Return the processes that share an evaluation, as tasks expect them."""
        return self.accelerator  # type: ignore[return-value]

    def place_model(self, model: nn.Module, task: TrainingTask, draw: Draw | None = None) -> list[str]:
        """Move the weights, or the shard of this process, to the device; changes `model` until `finish`.

        draw: see `deferred_initialization`. Returns notes for the user. Raises `InputError` if `task` does
        not support the configured parallelism.
        """
        if self.config.precision == "auto" and getattr(task, "needs_float32", False):
            self.precision = "no"
        model.to(self.device)
        return []

    def build(self, config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `model`, after `place_model`."""
        return config.build(model)

    def wrap(self, model: nn.Module) -> None:
        """Wrap `model` (on `device`) for training; the names and attributes of `model` do not change."""
        wrapped = model
        if self.world > 1:
            stacks = (module for module in model.modules() if isinstance(module, Stack))
            if any(stack.skips_layers for stack in stacks):  # each process skips different layers
                self.accelerator.ddp_handler.find_unused_parameters = True  # type: ignore[union-attr]
            wrapped = self.accelerator.prepare_model(model)
        self.wrapped = wrapped
        if self.config.compile:
            prepare_inductor()
            self.wrapped = torch.compile(wrapped)  # type: ignore[assignment]
            # Compiled code cannot read a mask, so this hook of the compiled module runs outside of it.
            self.wrapped.register_forward_pre_hook(drop_full_mask, with_kwargs=True)

    def forward_context(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass of training, in the configured precision."""
        return autocast(self.precision, self.device)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Return a context for an evaluation of `model`; it gives the module that tasks evaluate."""
        return nullcontext(model)

    def pass_context(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a pass, which synchronizes gradients only in the last pass of a step."""
        # A compiled module forwards attributes, so `no_sync` of the data-parallel module is used either way.
        return nullcontext() if last or self.world == 1 else self.accelerator.no_sync(self.wrapped)

    def passes(self, own: int, accumulate: int) -> int:
        """Return the number of passes that this process must run in a step, at most `accumulate`.

        own: batches that this process has. Full replicas of the model communicate only in the last pass.
        """
        return own

    def run_passes(self, loss_of: Callable[[nn.Module, Batch], Tensor], group: StepBatches) -> Tensor:
        """Compute the gradients of the mean loss over the labelled tokens of the step.

        loss_of: the mean loss of a module and a batch. Returns the sum of the losses of this process's
        tokens, a float64 scalar on the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (batch, weight) in enumerate(zip(group.batches, group.weights)):
            with self.pass_context(last=i + 1 == len(group.batches)):
                with self.forward_context():
                    loss = loss_of(self.wrapped, batch_to_device(batch, self.device))
                # Data parallelism averages gradients over ranks; the factor `data_world` makes it a sum.
                self.scaler.scale(loss * (weight * self.data_world / group.total)).backward()
            total += loss.detach().double() * weight
        return total

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> Tensor:
        """Clip the gradients, update the weights and reset the gradients; return the norm before clipping."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.scaler.unscale_(optimizer)
        norm = self.gradient_norm(parameters)
        if clip is not None:
            self.clip_gradients(parameters, clip, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the whole gradient."""
        return torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)

    def clip_gradients(self, parameters: list[nn.Parameter], most: float, norm: Tensor) -> None:
        """Scale the gradients with norm `norm` to a norm of at most `most`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)

    def sum(self, values: list[float]) -> Tensor:
        """Return the sums of `values` over the processes, in float64 on the device."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.gather(mine[None]).sum(0)  # counts processes that share batches once

    def rows(self, values: Tensor) -> list[list[float]]:
        """Return `values` [n] of every data-parallel rank, one row per rank. Waits for the device."""
        return self.gather(values[None]).tolist()

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows [B, ...] of all data-parallel ranks, concatenated; each has the same number."""
        return tensor if self.world == 1 else self.accelerator.gather(tensor)  # type: ignore[return-value]

    def broadcast(self, value: Any) -> Any:
        """Return the `value` of the first process."""
        if self.world == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def merge_requests(self, asked: SignalRequests) -> SignalRequests:
        """Return the union of the requests of all processes."""
        if self.world == 1:
            return asked
        mine = torch.tensor([asked.stop, asked.save, asked.failed], dtype=torch.float64, device=self.device)
        stops, saves, failures = zip(*self.accelerator.gather(mine[None]).tolist())  # type: ignore[union-attr]
        return SignalRequests(int(max(stops)), bool(max(saves)), bool(max(failures)))

    def writer(self, checkpoints: Checkpoints, background: bool) -> CheckpointWriter:
        """Return the checkpoint writer: the first process writes, of a divided model all processes."""
        return open_writer(checkpoints, background)

    def snapshot(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recurrent_state: State | None,
    ) -> Snapshot:
        """Return the content of a checkpoint, or the shard of this process."""
        return Snapshot.of(progress, model, optimizer, machine(self.device, self.world), recurrent_state)

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Write the weights of models to files, tied weights once.

        files: the model given to `place_model`, or submodules of it, by path. A sharded model is plain
        afterwards: complete in the first process, without data in the others.
        """
        for path, module in files.items() if self.rank == 0 else ():
            write_tensors(path, dict(module.state_dict()))
