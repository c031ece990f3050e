"""Pipeline parallelism by `torch.distributed.pipelining`: stages in processes, microbatches through them.

The microbatches of a step are the batches that it accumulates. Schedules: "gpipe" runs all forward passes,
then all backward passes (Huang et al. 2019, section 2.3); "1f1b" takes turns, so that a stage keeps the
activations of as many microbatches as there are stages (Narayanan et al. 2019, PipeDream); "interleaved" the
same with several runs of layers in each process, for shorter waits (Narayanan et al. 2021, section 2.2).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from polyformer.core.errors import InputError
from polyformer.model import Transformer
from polyformer.outputs import ModelOutput
from polyformer.parallel.microbatches import same_shape
from polyformer.parallel.stages import Stage, drop_others, only_stack, parameters_of, spans

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Batch = dict[str, Tensor]


class Pipeline:
    """This process's stages of `model`, from which all else is taken out.

    group: the processes of the pipeline, in the order of their stages. per_process: stages of each process,
    1 but for "interleaved"; the stages s, s + P, s + 2 P, ... are of process s of P.
    Raises `InputError` for models that need all their layers in one process.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        schedule: Schedule = "1f1b",
        per_process: int = 1,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        layers, self.rank, self.size = (
            len(only_stack(model).groups),
            dist.get_rank(group),
            dist.get_world_size(group),
        )
        assert isinstance(model, Transformer)
        if (schedule == "interleaved") != (per_process > 1):
            raise InputError(
                f"pipeline: {per_process} stages a process with the schedule '{schedule}'; 'interleaved' has "
                "2 or more, the others 1"
            )
        self.model, self.group, self.schedule = model, group, schedule
        self.device = next(model.parameters()).device
        parts = spans(layers, self.size * per_process)
        self.own = range(self.rank, len(parts), self.size)
        self.shared = self._shared(parts)
        drop_others(model, [parts[stage] for stage in self.own])
        self.stages = {stage: Stage(model, parts[stage], precision) for stage in self.own}
        self.last = len(parts) - 1
        self.runs: dict[Any, tuple[Any, list[Tensor]]] = {}

    def _shared(self, parts: list[range]) -> dict[nn.Parameter, tuple[bool, dist.ProcessGroup]]:
        """This process's parameters that others have too: whether it is their first, and their group."""
        holders = [parameters_of(self.model, parts[rank :: self.size]) for rank in range(self.size)]
        members = dist.get_process_group_ranks(self.group)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        shared = {}
        for parameter in self.model.parameters():
            ranks = tuple(rank for rank in range(self.size) if parameter in holders[rank])
            if self.rank in ranks and len(ranks) > 1:
                if ranks not in groups:
                    world = [members[rank] for rank in ranks]
                    groups[ranks] = dist.new_group(world, use_local_synchronization=True)  # type: ignore[assignment]
                shared[parameter] = (ranks[0] == self.rank, groups[ranks])
        return shared

    def step(self, batches: list[Batch], shares: list[float]) -> list[float]:
        """The forward and backward passes of one step: adds the gradients of sum_i shares_i loss_i to those
        that are there. Returns the losses, in every process of the pipeline.

        Raises `InputError` for fewer batches than the schedule needs.
        """
        self._check(len(batches))
        batch = same_shape(batches, shares)
        schedule, losses = self._run(batch["input_ids"].shape, len(batches))
        ids = batch.pop("input_ids")
        losses.clear()
        first = (ids,) if 0 in self.own else ()
        target = torch.tensor(shares, dtype=torch.float64, device=self.device)
        schedule.step(*first, target=target, return_outputs=False, **batch)
        self._sum_gradients()
        values = torch.stack(losses) if self.last in self.own else target.new_empty(len(batches))
        dist.broadcast(values, group=self.group, group_src=self.last % self.size)
        return values.tolist()

    def _check(self, microbatches: int) -> None:
        rounds = max(1, microbatches // self.size)
        if self.schedule == "1f1b" and microbatches < self.size:
            raise InputError(
                f"accumulate: the schedule '1f1b' needs as many microbatches as stages, {self.size}, got "
                f"{microbatches}; raise accumulate, or use 'gpipe'"
            )
        if self.schedule == "interleaved" and microbatches % rounds:
            raise InputError(
                f"accumulate: 'interleaved' on {self.size} processes runs microbatches in {rounds} equal "
                f"rounds, got {microbatches}; use a multiple of {self.size}"
            )

    def _run(self, shape: torch.Size, microbatches: int) -> tuple[Any, list[Tensor]]:
        """The schedule for microbatches of this shape, and where the last stage leaves their losses."""
        key = shape, microbatches
        if key not in self.runs:
            losses: list[Tensor] = []

            def loss(output: Tensor, share: Tensor) -> Tensor:
                losses.append(output.detach().double())
                return output * share.to(output.dtype).squeeze()

            stages = [self._stage(stage, shape, shape[0] // microbatches) for stage in self.own]
            common = {"n_microbatches": microbatches, "loss_fn": loss, "scale_grads": False}
            if self.schedule == "interleaved":
                self.runs[key] = ScheduleInterleaved1F1B(stages, **common), losses  # type: ignore[arg-type]
            else:
                kind = ScheduleGPipe if self.schedule == "gpipe" else Schedule1F1B
                self.runs[key] = kind(stages[0], **common), losses  # type: ignore[arg-type]
        return self.runs[key]

    def _stage(self, number: int, shape: torch.Size, rows: int) -> PipelineStage:
        """Stage `number` for microbatches [rows, T], whose shapes are known without a trial run."""
        parameter = next(self.model.parameters())
        ids = torch.empty(rows, shape[1], dtype=torch.long, device="meta")
        width = self.model.config.hidden_size
        hidden = torch.empty(rows, shape[1], width, dtype=parameter.dtype, device="meta").requires_grad_()
        loss = torch.empty((), dtype=parameter.dtype, device="meta").requires_grad_()
        return PipelineStage(
            self.stages[number],
            number,
            self.last + 1,
            self.device,
            input_args=ids if number == 0 else hidden,
            output_args=loss if number == self.last else hidden,
            group=self.group,
        )

    def _sum_gradients(self) -> None:
        """Parameters in several stages get the sum of their gradients, so that they stay one."""
        for parameter, (_, group) in self.shared.items():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=group)

    def counted(self) -> list[nn.Parameter]:
        """The parameters that this process counts in a norm over all stages: each is counted by one."""
        return [p for p in self.model.parameters() if p not in self.shared or self.shared[p][0]]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ModelOutput:
        """What the whole model returns for `batch`, in every process; predictions travel when they are read,
        which all processes must do alike."""
        x, output = batch["input_ids"], None
        rest = {name: value for name, value in batch.items() if name != "input_ids"}
        hidden = torch.empty(
            *x.shape, self.model.config.hidden_size, dtype=next(self.model.parameters()).dtype
        )
        hidden = hidden.to(self.device)
        for number, stage in self.stages.items():
            if number and self.size > 1:
                dist.recv(hidden, group=self.group, group_src=(number - 1) % self.size)
            x = hidden if number else x
            with stage.precision():
                if stage.last:
                    output = stage.output(x, **rest)
                    hidden = output.last_hidden_state.to(hidden.dtype)
                    continue
                hidden = stage.hidden(x, **rest)[0].to(hidden.dtype)
            if self.size > 1:
                dist.send(hidden.contiguous(), group=self.group, group_dst=(number + 1) % self.size)
        return self._everywhere(output, hidden)

    def _everywhere(self, output: ModelOutput | None, hidden: Tensor) -> ModelOutput:
        """The last stage's output in all processes."""
        source = self.last % self.size

        def from_last(value: Tensor | None) -> Tensor | None:
            """`value` of the last stage's process: any tensor, or None."""
            said = [None if value is None else (value.shape, value.dtype)]
            dist.broadcast_object_list(said, group=self.group, group_src=source)
            if said[0] is None:
                return None
            shape, dtype = said[0]
            tensor = (
                torch.empty(shape, dtype=dtype, device=self.device) if value is None else value.contiguous()
            )
            dist.broadcast(tensor, group=self.group, group_src=source)
            return tensor

        def predictions() -> Any:
            value = None if output is None else output.logits
            return from_last(value)

        loss = from_last(None if output is None else output.loss)
        everywhere = from_last(None if output is None else hidden)
        assert everywhere is not None
        return ModelOutput(loss, everywhere, predictions)
