"""Engines of models that are divided among processes: shards of weights, heads, texts or layers in each.

    MeshEngine       shards of all weights, some heads, some of the tokens of each text
    PipelineEngine   the same for some of the layers; the accumulated batches are its microbatches

They differ from `polyformer.training.engine.Engine` where a process has a part of the model only.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from polyformer.core.errors import InputError
from polyformer.core.host_values import batch_to_device
from polyformer.core.sequence.context_parallel import context_parallel
from polyformer.core.state import State
from polyformer.models.initialization import Draw
from polyformer.training.checkpoint import Checkpoints, CheckpointWriter, Progress, Snapshot, open_writer
from polyformer.training.config import EngineConfig
from polyformer.training.distributed.fully_sharded import (
    apply_fsdp,
    clip_gradients,
    compile_layers,
    gradient_norm,
    materialize,
    split_groups_by_mesh,
    unsharded,
)
from polyformer.training.distributed.pipeline import Pipeline, PipelinedModel
from polyformer.training.distributed.sharded_files import (
    Fetch,
    ShardedCheckpoints,
    UnshardedModel,
    checkpoint_group,
    gather_tensor,
)
from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel
from polyformer.training.engine import Engine
from polyformer.training.machine import ReplicaGroup, open_mesh
from polyformer.training.optimizers import OptimizerConfig
from polyformer.training.task import Batch, EvaluationGroup, StepBatches, TrainingTask


def open_mesh_engine(config: EngineConfig) -> "MeshEngine":
    """Return the engine of this process for a model that is divided as `config.parallel` says."""
    return PipelineEngine(config) if config.parallel.pipeline > 1 else MeshEngine(config)


class MeshEngine(Engine):
    """A process of a mesh, with shards of the weights, some of the heads, and some tokens of each text."""

    whole: ClassVar[bool] = False

    def __init__(self, config: EngineConfig) -> None:
        if config.precision == "fp16":
            raise InputError("precision: 'fp16' scales its loss, which needs whole gradients; use 'bf16'")
        super().__init__(config)
        self.mesh = open_mesh(config.parallel, self.device.type)
        self.data_rank, self.data_world = self.mesh.data_rank, self.mesh.data_world
        self.seed_rank = self.data_rank + self.mesh.rank("pipeline") * self.data_world
        self.unsharded_model: UnshardedModel | None = None  # the model before sharding

    @property
    def evaluation_group(self) -> EvaluationGroup:
        """Return the replicas of the model.

        Processes that share one copy of a model evaluate the same batches, because each batch needs all their
        shards.
        """
        return ReplicaGroup(self.mesh)

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

    def place_model(self, model: nn.Module, task: TrainingTask, draw: Draw | None = None) -> list[str]:
        """Divide the heads, then the weights, and move the shard of this process to the device."""
        self.check_task(task)
        if self.config.precision == "auto" and getattr(task, "needs_float32", False):
            self.precision = "no"
        self.unsharded_model = UnshardedModel(model)
        notes = []
        if self.mesh.size("tensor") > 1:
            notes += apply_tensor_parallel(model, self.mesh.device_mesh["tensor"])
        return notes + self.shard(model, draw)

    def shard(self, model: nn.Module, draw: Draw | None) -> list[str]:
        """Divide the weights of `model`; return notes."""
        return self.shard_local(model, model, draw)

    def shard_local(self, model: nn.Module, root: nn.Module, draw: Draw | None) -> list[str]:
        """Move the local weights of `model`, or their shard, to the device; return notes.

        root: the module to call, `model` or a wrapper of it. draw: as in `place_model`.
        """
        divided = self.mesh.sharding.size() > 1
        if not divided:
            model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.device))
        if self.config.compile:
            compile_layers(model)
        notes = apply_fsdp(model, self.mesh.sharding, root) if divided else []
        materialize(model, self.device, draw)
        return notes

    def build(self, config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of `model`, after `place_model`; its groups are split by mesh."""
        self.config.parallel.check_optimizer(config.kind)
        optimizer = config.build(model)
        split_groups_by_mesh(optimizer)
        return optimizer

    def wrap(self, model: nn.Module) -> None:
        """Use `model` itself, which is compiled layer by layer when it is sharded."""
        self.wrapped = model

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in the configured precision; the processes of a context-parallel group share texts."""
        with super().forward_context(), self.context_parallel():
            yield

    def context_parallel(self) -> AbstractContextManager[None]:
        """Return a context in which the processes of the context-parallel group share each text."""
        return (
            context_parallel(self.mesh.group("context")) if self.mesh.size("context") > 1 else nullcontext()
        )

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """Prepare a sharded model for evaluation while the context is active.

        Parameters outside of the layers of a stack can be read outside `model.forward`, all processes have
        the buffers of the first process, and context parallelism is active as in training.
        """
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)
        with unsharded(model), self.context_parallel():
            yield model

    def pass_context(self, last: bool) -> AbstractContextManager[object]:
        """Reduce gradients over the replicas in the last pass only.

        Shards are reduced after every pass: otherwise each process would hold all gradients.
        """
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_all_reduce(last)
        return nullcontext()

    def passes(self, own: int, accumulate: int) -> int:
        """Return the same number in all processes, since shards communicate in every pass."""
        return int(max(row[0] for row in self.rows(torch.tensor([own], device=self.device))))

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the whole gradient, in which every shard is counted once."""
        return gradient_norm(parameters)

    def clip_gradients(self, parameters: list[nn.Parameter], most: float, norm: Tensor) -> None:
        """Scale the shards of the gradients."""
        clip_gradients(parameters, most, norm)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows [B, ...] of the processes that read batches, one of each group."""
        every: Any = super().gather(tensor)
        return every.unflatten(0, (self.world, -1))[self.mesh.readers].flatten(0, 1)

    def writer(self, checkpoints: Checkpoints, background: bool) -> CheckpointWriter:
        """Return a writer of the shards of all processes."""
        group = checkpoint_group(self.config.timeout)
        return open_writer(ShardedCheckpoints(checkpoints, group), background)

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Gather the weights one by one into files; the model is plain afterwards."""
        self.restore(gather_tensor, files)

    def restore(self, fetch: Fetch, files: Mapping[Path, nn.Module]) -> None:
        """Write `files` and make the model plain, with tensors from `fetch`."""
        assert self.unsharded_model is not None
        self.unsharded_model.restore(fetch, files)
        self.unsharded_model = None


class PipelineEngine(MeshEngine):
    """A process of a mesh with some of the layers of a model. All processes of the pipeline share batches."""

    pipeline: Pipeline

    def shard(self, model: nn.Module, draw: Draw | None) -> list[str]:
        """Take the stages of this process out of `model`, and divide their weights; return notes."""
        parallel, notes = self.config.parallel, list[str]()
        self.pipeline = Pipeline(
            model,
            self.mesh.group("pipeline"),
            parallel.pipeline_schedule,
            parallel.stages,
            self.forward_context,
            lambda root: notes.extend(self.shard_local(model, root, draw)),
        )
        return notes

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[nn.Module]:
        """Gather the weights outside of layers while the context is active; it gives the whole pipeline."""
        with unsharded(self.pipeline.root):
            yield PipelinedModel(self.pipeline)

    def passes(self, own: int, accumulate: int) -> int:
        """Return `accumulate`, since a schedule has a fixed number of microbatches."""
        return accumulate

    def run_passes(self, loss_of: Callable[[nn.Module, Batch], Tensor], group: StepBatches) -> Tensor:
        """Run the batches of the step as microbatches; the stages compute the loss of the model."""
        # Gradients are averaged over the shards of a replica, and summed over replicas.
        shares = [float(weight * self.mesh.size("shard") / group.total) for weight in group.weights]
        losses = self.pipeline.step([batch_to_device(batch, self.device) for batch in group.batches], shares)
        if self.mesh.size("data") > 1:
            self.pipeline.sum_over_replicas(self.mesh.group("data"))
        total = sum(loss * weight for loss, weight in zip(losses, group.weights))
        return torch.tensor(total, dtype=torch.float64, device=self.device)

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients of all stages."""
        return self.pipeline.norm()

    def snapshot(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recurrent_state: State | None,
    ) -> Snapshot:
        """Return the shard of this process, with the optimizer's numbers for the layers of all stages."""
        snapshot = super().snapshot(progress, model, optimizer, recurrent_state)
        every: list[dict[str, Any]] = [{}] * self.pipeline.size
        torch.distributed.all_gather_object(every, snapshot.kind["scalars"], self.pipeline.group)
        snapshot.kind["scalars"] = {name: value for own in every for name, value in own.items()}
        return snapshot

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Rejoin the stages, and gather their weights."""
        self.pipeline.owners.restore_modules()
        self.restore(self.pipeline.owners.fetch, files)
        del self.pipeline
