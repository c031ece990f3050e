"""Pipeline parallelism by `torch.distributed.pipelining`: stages in processes, microbatches through them.

The microbatches of a step are the batches that it accumulates. Schedules: "gpipe" runs all forward passes,
then all backward passes (Huang et al. 2019, section 2.3); "1f1b" takes turns, so that a stage keeps the
activations of as many microbatches as there are stages (Narayanan et al. 2019, PipeDream), and, with several
stages in each process, interleaves them for shorter waits (Narayanan et al. 2021, section 2.2).
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from polyformer.outputs import ModelOutput
from polyformer.parallel.config import PipelineSchedule, check_microbatches
from polyformer.parallel.holders import Holders
from polyformer.parallel.microbatches import same_shape
from polyformer.parallel.shard import gradient_norm, local
from polyformer.parallel.stages import Root, Stage, check, spans, stacks

Batch = dict[str, Tensor]

KEPT = 4
"""Schedules, by the shapes of their microbatches, that stay with what they receive into."""


class Pipeline:
    """This process's stages of `model`, from which all else is taken out.

    group: the processes of the pipeline, in the order of their stages. per_process: stages of each process;
    the stages s, s + P, s + 2 P, ... are of process s of P. divide: divides what this process has further
    (`shard.py`), and brings it to its device; heads are divided before (`tensor.py`).
    Raises `InputError` for models that need all their layers in one process.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        schedule: PipelineSchedule = "1f1b",
        per_process: int = 1,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        divide: Callable[[Root], object] = lambda _: None,
    ):
        self.model = check(model)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.per_process = group, per_process
        self.schedule: PipelineSchedule = schedule
        self.layers = [len(stack.groups) for stack in stacks(self.model).values()]
        self.spans = spans(sum(self.layers), self.size * per_process)
        self.last = len(self.spans) - 1
        self.own = range(self.rank, len(self.spans), self.size)
        own = [self.spans[rank :: self.size] for rank in range(self.size)]
        self.holders = Holders(self.model, own, group)
        self.holders.drop()
        self.root = Root(self.model)
        divide(self.root)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.shared = self._shared()
        self.stages = {stage: Stage(self.root, self.spans[stage], precision) for stage in self.own}
        self.schedules: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # by sizes, the last used last

    def _shared(self) -> dict[nn.Parameter, tuple[bool, dist.ProcessGroup]]:
        """This process's parameters that others have too: whether it is their first, and their group."""
        members = dist.get_process_group_ranks(self.group)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        shared = {}
        for parameter, ranks in self.holders.now():
            if isinstance(parameter, nn.Parameter) and self.rank in ranks and len(ranks) > 1:
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
        check_microbatches(len(batches), self.size, self.schedule, self.per_process)
        batch = same_shape(batches, shares)
        schedule = self._run(_lengths(batch), len(batch["input_ids"]), len(batches))
        ids = batch.pop("input_ids")
        for stage in self.stages.values():
            stage.losses.clear()
        first = (ids,) if 0 in self.own else ()
        target = torch.tensor(shares, dtype=torch.float64, device=self.device)
        schedule.step(*first, target=target, return_outputs=False, **batch)
        self._sum_gradients()
        values = torch.stack([torch.stack(stage.losses) for stage in self.stages.values()]).sum(0)
        dist.all_reduce(values, group=self.group)
        return values.tolist()

    def _run(self, lengths: tuple[int, int], rows: int, microbatches: int) -> Any:
        """The schedule for microbatches of these sizes."""
        key = lengths, rows, microbatches
        if key in self.schedules:
            self.schedules.move_to_end(key)
        else:
            if len(self.schedules) == KEPT:
                self.schedules.popitem(last=False)
            stages = [self._stage(stage, rows // microbatches, lengths) for stage in self.own]
            common: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": _share, "scale_grads": False}
            if self.per_process > 1:
                self.schedules[key] = ScheduleInterleaved1F1B(list(stages), **common)
            else:
                kind = ScheduleGPipe if self.schedule == "gpipe" else Schedule1F1B
                self.schedules[key] = kind(stages[0], **common)
        return self.schedules[key]

    def _stage(self, number: int, rows: int, lengths: tuple[int, int]) -> PipelineStage:
        """Stage `number` for microbatches of these sizes, whose shapes are known without a trial run."""
        loss = torch.empty((), dtype=self.dtype, device="meta").requires_grad_()
        return PipelineStage(
            self.stages[number],
            number,
            self.last + 1,
            self.device,
            input_args=self._read(number, rows, lengths, "meta"),
            output_args=loss if number == self.last else self._read(number + 1, rows, lengths, "meta"),
            group=self.group,
        )

    def _read(
        self, number: int, rows: int, lengths: tuple[int, int], device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Room for what stage `number` reads: ids, or hidden states of the text or source; of the target too
        where its first layers are behind."""
        if number == 0:
            return (torch.empty(rows, lengths[0], dtype=torch.long, device=device),)
        target = len(self.layers) == 2 and self.spans[number].start > self.layers[0]
        sizes = lengths if target else lengths[:1]
        width = self.model.config.hidden_size
        return tuple(
            torch.empty(rows, size, width, dtype=self.dtype, device=device).requires_grad_() for size in sizes
        )

    def _sum_gradients(self) -> None:
        """Parameters in several stages get the sum of their gradients, so that they stay one."""
        for parameter, (_, group) in self.shared.items():
            _sum_gradient(parameter, group)

    def sum_over_copies(self, group: dist.ProcessGroup) -> None:
        """Gradients summed over whole copies of the model, which are the processes of `group`."""
        for parameter in self.model.parameters():
            _sum_gradient(parameter, group)

    def norm(self) -> Tensor:
        """The norm of the whole gradient, float64."""
        counted = (p for p in self.model.parameters() if p not in self.shared or self.shared[p][0])
        total = gradient_norm(counted).square().to(self.device)
        dist.all_reduce(total, group=self.group)
        return total.sqrt()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ModelOutput:
        """What the whole model returns for `batch`, in every process; predictions travel when they are read,
        which all processes must do alike."""
        rest, output = dict(batch), None
        values: tuple[Tensor, ...] = (rest.pop("input_ids"),)
        for number, stage in self.stages.items():
            if number and self.size > 1:
                values = self._read(number, len(values[0]), _lengths(batch), self.device)
                for value in values:
                    dist.recv(value, group=self.group, group_src=(number - 1) % self.size)
            read = stage.evaluated(*values, **rest)
            if isinstance(read, ModelOutput):
                output = read
                continue
            values = tuple(value.to(self.dtype).contiguous() for value in read)
            if self.size > 1:
                for value in values:
                    dist.send(value, group=self.group, group_dst=(number + 1) % self.size)
        return self._everywhere(output)

    def _everywhere(self, output: ModelOutput | None) -> ModelOutput:
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
            return from_last(None if output is None else output.logits)

        loss = from_last(None if output is None else output.loss)
        hidden = from_last(None if output is None else output.last_hidden_state)
        assert hidden is not None
        return ModelOutput(loss, hidden, predictions)


def _share(loss: Tensor, share: Tensor) -> Tensor:
    return loss * share.to(loss.dtype).squeeze()


def _sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    if parameter.requires_grad:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(local(parameter.grad), group=group)


class Pipelined(nn.Module):
    """A model by its pipeline, for those who call it without gradients, in all processes alike."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.pipeline, self.stages = pipeline, pipeline.model
        self.config = pipeline.model.config

    def forward(self, **batch: Tensor) -> ModelOutput:
        """What the whole model returns."""
        return self.pipeline.evaluate(batch)


def _lengths(batch: Batch) -> tuple[int, int]:
    """The tokens of a row: of the text or source, and of the target where there is one."""
    target = batch.get("decoder_input_ids", batch.get("labels", batch["input_ids"]))
    return batch["input_ids"].shape[1], target.shape[-1]
