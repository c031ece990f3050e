"""Where and how the passes run: device, processes, precision, compilation. Built on `accelerate`."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyformer.core import launcher
from polyformer.core.errors import InputError
from polyformer.core.files import write_tensors
from polyformer.core.initialization import Draw
from polyformer.parallel.mesh import Mesh, open_mesh
from polyformer.sequence.spread import spread_over
from polyformer.stack import Stack
from polyformer.training.background import Writer, writers
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.config import EngineConfig
from polyformer.training.copies import Copies
from polyformer.training.environment import machine
from polyformer.training.optimizers import OptimizerConfig
from polyformer.training.processes import open_accelerator
from polyformer.training.signals import Asked
from polyformer.training.task import Batch, Evaluators, Task

if TYPE_CHECKING:
    from polyformer.parallel.pipeline import Pipeline
    from polyformer.parallel.whole import Form

HALVES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_main() -> bool:
    """Whether this process is the only one of its run, or the first; known before there is an engine."""
    return launcher.rank() == 0


class Engine:
    """One process of a run, alone or under `accelerate launch` or `torchrun`.

    Precision is torch's autocast around the loss rather than accelerate's, which would patch the caller's
    model and turn its outputs (all logits) back into float32.
    """

    def __init__(self, config: EngineConfig) -> None:
        if config.device == "cuda" and not torch.cuda.is_available():
            raise InputError(
                "device: 'cuda' was asked for, but torch finds no CUDA device; use 'auto' or 'cpu'"
            )
        use_cuda = config.device != "cpu" and torch.cuda.is_available()
        self.config = config
        config.parallel.sizes(launcher.world())  # before the processes wait for each other
        if config.precision == "fp16" and not config.parallel.whole:
            raise InputError("precision: 'fp16' scales its loss, which needs whole gradients; use 'bf16'")
        self.accelerator = open_accelerator("cuda" if use_cuda else "cpu", config.timeout)
        self.device = self.accelerator.device
        if config.precision == "fp16" and self.device.type != "cuda":
            raise InputError("precision: 'fp16' needs a CUDA device; on the CPU use 'bf16' or 'no'")
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.mesh: Mesh | None = None  # where processes do more than read batches of their own
        if not config.parallel.whole:
            self.mesh = open_mesh(config.parallel, self.device.type)
        self.form: Form | None = None  # of the model before it was divided
        self.pipeline: Pipeline | None = None  # its stages, where its layers are divided
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.wrapped: nn.Module = nn.Identity()

    @property
    def data_world(self) -> int:
        """How many processes, or groups that share batches, read batches of their own."""
        return self.world if self.mesh is None else self.mesh.data_world

    @property
    def data_rank(self) -> int:
        """Which of them this process belongs to."""
        return self.rank if self.mesh is None else self.mesh.data_rank

    @property
    def seed_rank(self) -> int:
        """Whose random numbers this process draws: those that compute the same draw the same."""
        stage = 0 if self.mesh is None else self.mesh.rank("pipeline")
        return self.data_rank + stage * self.data_world

    @property
    def evaluators(self) -> Evaluators:
        """The processes that share an evaluation, as tasks ask for them. Those that hold one copy of the
        model together evaluate the same batches: each needs the others' weights for every one."""
        return self.accelerator if self.mesh is None else Copies(self.mesh)  # type: ignore[return-value]

    def evaluated(self, model: nn.Module) -> nn.Module:
        """What tasks evaluate: `model`, or its stages in all processes."""
        if self.pipeline is None:
            return model
        from polyformer.parallel.pipeline import Pipelined

        return Pipelined(self.pipeline)

    def place_model(self, model: nn.Module, task: Task, draw: Draw | None = None) -> list[str]:
        """Bring the weights to the device: all of them, or those that are this process's part, which changes
        `model` until `finish`. draw: see `late_weights`. Returns notes for the user; raises `InputError`
        where `task` cannot be."""
        self.check_task(task)
        if self.mesh is None:
            model.to(self.device)
            return []
        from polyformer.parallel.whole import Form

        self.form = Form(model)
        parallel, notes = self.config.parallel, []
        if self.mesh.size("tensor") > 1:
            from polyformer.parallel.tensor import divide_heads

            notes += divide_heads(model, self.mesh.device_mesh["tensor"])
        if parallel.pipeline == 1:
            return notes + self._place(model, model, draw)
        from polyformer.parallel.pipeline import Pipeline

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
        """Bring what this process has of `model` to the device, or its part of that; returns notes.

        root: what is called to run it, `model` itself or a module around it. draw: as in `place_model`.
        """
        from polyformer.parallel.late_weights import complete, move
        from polyformer.parallel.shard import compile_layers, shard

        assert self.mesh is not None
        divided = self.mesh.sharding.size() > 1
        if not divided:
            move(model, self.device)
        if self.config.compile:
            compile_layers(model)
        notes = shard(model, self.mesh.sharding, root) if divided else []
        complete(model, self.device, draw)
        return notes

    def build(self, config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of `model`, which is in its place."""
        self.config.parallel.check_optimizer(config.kind)
        optimizer = config.build(model)
        if self.mesh is not None:
            from polyformer.parallel.shard import split_by_mesh

            split_by_mesh(optimizer)
        return optimizer

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """While it lasts, what is no layer of a stack can be read outside `model.forward`, all processes have
        the first one's buffers, and those that share texts in training share them here."""
        if self.mesh is None:
            yield
            return
        from polyformer.parallel.shard import unsharded

        if self.pipeline is None:
            for buffer in model.buffers():
                torch.distributed.broadcast(buffer, 0)
        with unsharded(model if self.pipeline is None else self.pipeline.root), self.spread():
            yield

    def finish(self, files: Mapping[Path, nn.Module]) -> None:
        """Write the weights of models, the one that was placed or parts of it, into files, tied ones once.

        A divided model is plain afterwards: whole in the first process, without numbers in the others.
        """
        if self.form is None:
            for path, module in files.items() if self.rank == 0 else ():
                write_tensors(path, dict(module.state_dict()))
            return
        from polyformer.parallel.whole import gathered

        fetch = gathered
        if self.pipeline is not None:
            fetch = self.pipeline.holders.fetch
            self.pipeline.holders.rejoin()
        self.form.restore(fetch, files)
        self.form = self.pipeline = None

    def wrap(self, model: nn.Module) -> None:
        """Take `model` (on `device`) as the one that runs; its own names and attributes stay as they are."""
        if self.mesh is not None:
            self.wrapped = model
            return
        wrapped = model
        if self.world > 1:
            stacks = (module for module in model.modules() if isinstance(module, Stack))
            if any(stack.leaves_out for stack in stacks):  # in each process others
                self.accelerator.ddp_handler.find_unused_parameters = True  # type: ignore[union-attr]
            wrapped = self.accelerator.prepare_model(model)
        self.wrapped = torch.compile(wrapped) if self.config.compile else wrapped  # type: ignore[assignment]

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass in the configured precision."""
        if self.config.precision == "no":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=HALVES[self.config.precision])

    def spread(self) -> AbstractContextManager[None]:
        """Where a model reads texts that several processes share."""
        if self.mesh is None or self.mesh.size("context") == 1:
            return nullcontext()
        return spread_over(self.mesh.group("context"))

    def check_task(self, task: Task) -> None:
        """Raises `InputError` for a task that reads more of a model than its loss, where a process has a part
        of each text or some of the layers alone."""
        for name in ("context", "pipeline"):
            if getattr(self.config.parallel, name) > 1 and not getattr(task, "spreads", False):
                raise InputError(
                    f"parallel.{name}: this task reads more of the model than its loss, and a process has a "
                    "part of each text or model alone; set it to 1, or take a task such as lm, mlm or tag"
                )

    def unsynced(self, skip: bool) -> AbstractContextManager[object]:
        """With `skip`, gradients of this pass stay in the process: only the last of a step is exchanged."""
        if self.mesh is not None:
            from polyformer.parallel.shard import set_last_pass

            set_last_pass(self.wrapped, last=not skip)
            return nullcontext()
        # A compiled module forwards attributes: `no_sync` is that of the data-parallel module either way.
        return self.accelerator.no_sync(self.wrapped) if skip and self.world > 1 else nullcontext()

    def place(self, batch: Batch) -> Batch:
        """The batch on the device, through pinned memory where that is another than the CPU."""
        if self.device.type == "cpu":
            return batch
        return {
            name: tensor.pin_memory().to(self.device, non_blocking=True) for name, tensor in batch.items()
        }

    def sum(self, values: list[float]) -> torch.Tensor:
        """The sums over processes of a few numbers, float64 on the device."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.mesh is not None:  # those that share batches have the same
            return mine.new_tensor(self.rows(mine)).sum(0)
        return self.accelerator.reduce(mine, "sum") if self.world > 1 else mine  # type: ignore[return-value]

    def passes(self, own: int, accumulate: int) -> int:
        """How many passes this process must make in a step of which it has `own` batches, `accumulate` at the
        most. Whole copies of the model exchange something in the last alone, parts of one in every pass; a
        pipeline's schedule is of a number that stays."""
        if self.mesh is None:
            return own
        if self.pipeline is not None:
            return accumulate
        return int(max(row[0] for row in self.rows(torch.tensor([own], device=self.device))))

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        """`values` [n], one row of each process that reads its own batches. Waits for the device."""
        return self.gather(values[None]).tolist()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows [B, ...] of all batches, as many of each process that reads its own, one after another."""
        if self.world == 1:
            return tensor
        every: torch.Tensor = self.accelerator.gather(tensor)  # type: ignore[assignment]
        if self.mesh is None:
            return every
        return every.unflatten(0, (self.world, -1))[self.mesh.readers].flatten(0, 1)

    def agree(self, value: Any) -> Any:
        """What the first process has for `value`."""
        if self.world == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def united(self, values: dict[str, Any]) -> dict[str, Any]:
        """Entries of all stages of a pipeline, each of which has those of its own layers."""
        if self.pipeline is None:
            return values
        every: list[dict[str, Any]] = [{}] * self.pipeline.size
        torch.distributed.all_gather_object(every, values, self.pipeline.group)
        return {name: value for own in every for name, value in own.items()}

    def together(self, asked: Asked) -> Asked:
        """What any process was asked for."""
        if self.world == 1:
            return asked
        mine = torch.tensor([asked.stop, asked.save, asked.failed], dtype=torch.float64, device=self.device)
        stops, saves, failures = zip(*self.accelerator.gather(mine[None]).tolist())  # type: ignore[union-attr]
        return Asked(int(max(stops)), bool(max(saves)), bool(max(failures)))

    def writer(self, checkpoints: Checkpoints, background: bool) -> Writer:
        """What writes this run's checkpoints: all processes where they divide the model, else the first."""
        group = None if self.mesh is None else writers(self.config.timeout)
        return Writer(checkpoints, background, group)

    def machine(self) -> dict[str, Any]:
        """What computes, as checkpoints record it."""
        return machine(self.device, self.world)

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> torch.Tensor:
        """Clip the gradients, update the weights, forget the gradients; returns the norm before clipping."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self.mesh is not None:
            from polyformer.parallel.shard import gradient_norm, update_parts

            norm = gradient_norm(parameters) if self.pipeline is None else self.pipeline.norm()
            return update_parts(optimizer, parameters, clip, norm)
        self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm
