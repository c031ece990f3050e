"""Execution of the passes: device, processes, precision, compilation. Built on `accelerate`."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyformer.core import launcher
from polyformer.core.errors import InputError
from polyformer.core.files import write_tensors
from polyformer.core.host_values import batch_to_device, drop_full_mask
from polyformer.core.initialization import Draw
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.sequence.context_parallel import context_parallel
from polyformer.nn.stack import Stack
from polyformer.training.checkpoint import Checkpoints, CheckpointWriter, checkpoint_group
from polyformer.training.config import EngineConfig
from polyformer.training.machine import (
    Mesh,
    ReplicaGroup,
    autocast,
    choose_device,
    choose_precision,
    machine,
    open_accelerator,
    open_mesh,
    tensor_float32,
)
from polyformer.training.optimizers import OptimizerConfig
from polyformer.training.run_control import SignalRequests
from polyformer.training.task import Batch, EvaluationGroup, TrainingTask

if TYPE_CHECKING:
    from polyformer.training.distributed.pipeline import Pipeline
    from polyformer.training.distributed.sharded_files import UnshardedModel


def is_main() -> bool:
    """Return whether this process is the first or only process of its run; available before the engine."""
    return launcher.rank() == 0


class Engine:
    """A single process of a run, started directly or by `accelerate launch` or `torchrun`.

    Mixed precision uses torch's autocast around the loss instead of the option of accelerate, which would
    patch the caller's model and convert its outputs (all logits) back to float32.
    """

    def __init__(self, config: EngineConfig) -> None:
        device, self.config = choose_device(config.device), config
        config.parallel.sizes(launcher.world())  # before the processes wait for each other
        if config.precision == "fp16" and not config.parallel.whole:
            raise InputError("precision: 'fp16' scales its loss, which needs whole gradients; use 'bf16'")
        self.accelerator = open_accelerator(device.type, config.timeout)
        self.device = self.accelerator.device
        self.precision = choose_precision(config.precision, self.device)
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.mesh: Mesh | None = None  # None for plain data parallelism
        if not config.parallel.whole:
            self.mesh = open_mesh(config.parallel, self.device.type)
        self.unsharded_model: UnshardedModel | None = None  # of the model before sharding
        self.pipeline: Pipeline | None = None  # None without pipeline parallelism
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.wrapped: nn.Module = nn.Identity()

    @property
    def data_world(self) -> int:
        """Return the number of data-parallel ranks: processes, or groups that share batches."""
        return self.world if self.mesh is None else self.mesh.data_world

    @property
    def data_rank(self) -> int:
        """Return the data-parallel rank of this process."""
        return self.rank if self.mesh is None else self.mesh.data_rank

    @property
    def seed_rank(self) -> int:
        """Return the rank for random seeds. Processes that compute the same values draw the same numbers."""
        stage = 0 if self.mesh is None else self.mesh.rank("pipeline")
        return self.data_rank + stage * self.data_world

    @property
    def evaluation_group(self) -> EvaluationGroup:
        """Return the processes that share an evaluation, as tasks expect them.

        Processes that share one copy of a model evaluate the same batches, because each batch needs all their
        shards.
        """
        return self.accelerator if self.mesh is None else ReplicaGroup(self.mesh)  # type: ignore[return-value]

    def evaluation_module(self, model: nn.Module) -> nn.Module:
        """Return the module that tasks evaluate: `model`, or the pipeline of its stages in all processes."""
        if self.pipeline is None:
            return model
        from polyformer.training.distributed.pipeline import PipelinedModel

        return PipelinedModel(self.pipeline)

    def place_model(self, model: nn.Module, task: TrainingTask, draw: Draw | None = None) -> list[str]:
        """Move the weights, or the shard of this process, to the device; changes `model` until `finish`.

        draw: see `deferred_initialization`. Returns notes for the user. Raises `InputError` if `task` does
        not support the configured parallelism.
        """
        self.check_task(task)
        if self.config.precision == "auto" and getattr(task, "needs_float32", False):
            self.precision = "no"
        if self.mesh is None:
            model.to(self.device)
            return []
        from polyformer.training.distributed.sharded_files import UnshardedModel

        self.unsharded_model = UnshardedModel(model)
        parallel, notes = self.config.parallel, []
        if self.mesh.size("tensor") > 1:
            from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel

            notes += apply_tensor_parallel(model, self.mesh.device_mesh["tensor"])
        if parallel.pipeline == 1:
            return notes + self._place(model, model, draw)
        from polyformer.training.distributed.pipeline import Pipeline

        self.pipeline = Pipeline(
            model,
            self.mesh.group("pipeline"),
            parallel.pipeline_schedule,
            parallel.stages,
            self.autocast,
            lambda root: notes.extend(self._place(model, root, draw)),
        )
        return notes

    def _place(self, model: nn.Module, root: nn.Module, draw: Draw | None) -> list[str]:
        """Move the local weights of `model`, or their shard, to the device; return notes.

        root: the module to call, `model` or a wrapper of it. draw: as in `place_model`.
        """
        from polyformer.training.distributed.fully_sharded import apply_fsdp, compile_layers, materialize

        assert self.mesh is not None
        divided = self.mesh.sharding.size() > 1
        if not divided:
            model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))
        if self.config.compile:
            compile_layers(model)
        notes = apply_fsdp(model, self.mesh.sharding, root) if divided else []
        materialize(model, self.device, draw)
        return notes

    def build(self, config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `model`, after `place_model`."""
        self.config.parallel.check_optimizer(config.kind)
        optimizer = config.build(model)
        if self.mesh is not None:
            from polyformer.training.distributed.fully_sharded import split_groups_by_mesh

            split_groups_by_mesh(optimizer)
        return optimizer

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Prepare a sharded model for evaluation while the context is active.

        Parameters outside of the layers of a stack can be read outside `model.forward`, all processes have
        the buffers of the first process, and context parallelism is active as in training.
        """
        if self.mesh is None:
            yield
            return
        from polyformer.training.distributed.fully_sharded import unsharded

        if self.pipeline is None:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)
        with unsharded(model if self.pipeline is None else self.pipeline.root), self.context_parallel():
            yield

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Write the weights of models to files, tied weights once.

        files: the model given to `place_model`, or submodules of it, by path. A sharded model is plain
        afterwards: complete in the first process, without data in the others.
        """
        if self.unsharded_model is None:
            for path, module in files.items() if self.rank == 0 else ():
                write_tensors(path, dict(module.state_dict()))
            return
        from polyformer.training.distributed.sharded_files import gather_tensor

        fetch = gather_tensor
        if self.pipeline is not None:
            fetch = self.pipeline.owners.fetch
            self.pipeline.owners.restore_modules()
        self.unsharded_model.restore(fetch, files)
        self.unsharded_model = self.pipeline = None

    def wrap(self, model: nn.Module) -> None:
        """Wrap `model` (on `device`) for training; the names and attributes of `model` do not change."""
        if self.mesh is not None:
            self.wrapped = model
            return
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

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass in the configured precision."""
        return autocast(self.precision, self.device)

    def tensor_float32(self) -> AbstractContextManager[None]:
        """Return the context of a run: see `polyformer.training.machine.tensor_float32`."""
        return tensor_float32(self.precision, self.device)

    def context_parallel(self) -> AbstractContextManager[None]:
        """Return a context in which the processes of the context-parallel group share each text."""
        if self.mesh is None or self.mesh.size("context") == 1:
            return nullcontext()
        return context_parallel(self.mesh.group("context"))

    def check_task(self, task: TrainingTask) -> None:
        """Raise `InputError` if `task` needs more than the loss under context or pipeline parallelism.

        In these cases a process has only a part of each text or some of the layers.
        """
        for name in ("context", "pipeline"):
            if getattr(self.config.parallel, name) > 1 and not getattr(
                task, "supports_context_parallel", False
            ):
                raise InputError(
                    f"parallel.{name}: this task reads more of the model than its loss, and a process has a "
                    "part of each text or model alone; set it to 1, or take a task such as lm, mlm or tag"
                )

    def no_sync_unless_last(self, skip: bool) -> AbstractContextManager[object]:
        """Return a context that skips gradient synchronization if `skip`, for all but the last pass."""
        if self.mesh is not None:
            from torch.distributed.fsdp import FSDPModule

            if isinstance(self.wrapped, FSDPModule):
                # Shards are reduced after every pass: otherwise each process would hold all gradients.
                self.wrapped.set_requires_all_reduce(not skip)
            return nullcontext()
        # A compiled module forwards attributes, so `no_sync` of the data-parallel module is used either way.
        return self.accelerator.no_sync(self.wrapped) if skip and self.world > 1 else nullcontext()

    def place(self, batch: Batch) -> Batch:
        """Return the batch on the device; checks still read its values on the CPU (`core.host_values`)."""
        return batch_to_device(batch, self.device)

    def sum(self, values: list[float]) -> torch.Tensor:
        """Return the sums of `values` over the processes, in float64 on the device."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        return self.gather(mine[None]).sum(0)  # counts processes that share batches once

    def passes(self, own: int, accumulate: int) -> int:
        """Return the number of passes that this process must run in a step, at most `accumulate`.

        own: batches that this process has. Full replicas of the model communicate only in the last pass,
        shards in every pass, so that all processes need the same number. A pipeline schedule has a fixed
        number.
        """
        if self.mesh is None:
            return own
        if self.pipeline is not None:
            return accumulate
        return int(max(row[0] for row in self.rows(torch.tensor([own], device=self.device))))

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        """Return `values` [n] of every data-parallel rank, one row per rank. Waits for the device."""
        return self.gather(values[None]).tolist()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows [B, ...] of all data-parallel ranks, concatenated; each has the same number."""
        if self.world == 1:
            return tensor
        every: torch.Tensor = self.accelerator.gather(tensor)  # type: ignore[assignment]
        if self.mesh is None:
            return every
        return every.unflatten(0, (self.world, -1))[self.mesh.readers].flatten(0, 1)

    def broadcast(self, value: Any) -> Any:
        """Return the `value` of the first process."""
        if self.world == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def merge_stages(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of all pipeline stages, merged; each stage has the entries for its layers."""
        if self.pipeline is None:
            return values
        every: list[dict[str, Any]] = [{}] * self.pipeline.size
        torch.distributed.all_gather_object(every, values, self.pipeline.group)
        return {name: value for own in every for name, value in own.items()}

    def merge_requests(self, asked: SignalRequests) -> SignalRequests:
        """Return the union of the requests of all processes."""
        if self.world == 1:
            return asked
        mine = torch.tensor([asked.stop, asked.save, asked.failed], dtype=torch.float64, device=self.device)
        stops, saves, failures = zip(*self.accelerator.gather(mine[None]).tolist())  # type: ignore[union-attr]
        return SignalRequests(int(max(stops)), bool(max(saves)), bool(max(failures)))

    def writer(self, checkpoints: Checkpoints, background: bool) -> CheckpointWriter:
        """Return the checkpoint writer: all processes write a sharded model, otherwise only the first."""
        group = None if self.mesh is None else checkpoint_group(self.config.timeout)
        return CheckpointWriter(checkpoints, background, group)

    def machine(self) -> dict[str, Any]:
        """Return the description of the hardware that checkpoints record."""
        return machine(self.device, self.world)

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> torch.Tensor:
        """Clip the gradients, update the weights and reset the gradients; return the norm before clipping."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.scaler.unscale_(optimizer)
        if self.mesh is None:
            norm = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
            clip_gradients = torch.nn.utils.clip_grads_with_norm_
        else:
            from polyformer.training.distributed.fully_sharded import clip_gradients, gradient_norm

            norm = gradient_norm(parameters) if self.pipeline is None else self.pipeline.norm()
        if clip is not None:
            clip_gradients(parameters, clip, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm
