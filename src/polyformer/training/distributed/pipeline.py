"""Pipeline parallelism with `torch.distributed.pipelining`: stages in processes, fed with microbatches.

The microbatches of a step are the accumulated batches. Schedules: "gpipe" runs all forward passes,
then all backward passes (Huang et al. 2019, section 2.3); "1f1b" alternates them, so that the number of
microbatches with stored activations is at most the number of stages (Narayanan et al. 2019, PipeDream), and,
with several stages in each process, interleaves them for less idle time (Narayanan et al. 2021, section 2.2).
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.models.outputs import ModelOutput
from polyformer.training.config import PipelineSchedule
from polyformer.training.distributed.fully_sharded import gradient_norm, local_shard
from polyformer.training.distributed.pipeline_stages import (
    LOSS_WEIGHT,
    ParameterOwners,
    PipelineRoot,
    Stage,
    check_pipelined,
    stacks,
    stage_spans,
)

Batch = dict[str, Tensor]
FILL = {"labels": IGNORED, "shift_labels": IGNORED}
"""Padding values other than 0."""


def same_shape(batches: list[Batch], shares: list[float]) -> Batch:
    """Return all batches concatenated [M B, T], each padded to the maximum number of rows and tokens.

    Padding belongs to no text (`attention_mask` 0) and has no label. `share` [M] contains the weight of the
    loss of each batch. The target entries of an encoder-decoder are padded to a separate length. Raises
    `InputError` for entries that are neither per token nor per text.
    """
    rows = max(len(batch["input_ids"]) for batch in batches)
    shapes = [{name: value.shape for name, value in batch.items()} for batch in batches]
    alike = all(shape == shapes[0] for shape in shapes)
    masked = batches if alike else [_with_masks(batch) for batch in batches]
    names = masked[0].keys()
    if any(batch.keys() != names for batch in masked):
        raise InputError("pipeline: the batches of a step have different entries; set accumulate to 1")
    joined = {}
    for name in names:
        values = [batch[name] for batch in masked]
        if any(value.dim() > 2 for value in values):
            shape = tuple(values[0].shape)
            raise InputError(f"pipeline: expected entries [batch, length] or [batch], got {name} {shape}")
        length = max(value.shape[-1] for value in values)
        joined[name] = torch.cat([_padded(value, name, rows, length) for value in values])
    return {**joined, LOSS_WEIGHT: torch.tensor(shares, dtype=torch.float64)}


def _with_masks(batch: Batch) -> Batch:
    masks = {"attention_mask": torch.ones_like(batch["input_ids"])}
    if "decoder_input_ids" in batch:
        masks["decoder_attention_mask"] = torch.ones_like(batch["decoder_input_ids"])
    return {**masks, **batch}


def _padded(value: Tensor, name: str, rows: int, length: int) -> Tensor:
    """Return the entry `name`, per token or per text, padded to `rows` and `length`."""
    fill = FILL.get(name, 0)
    if value.dim() == 2:
        missing = length - value.shape[1]
        if name == "document_ids":  # document ids must not decrease along a row
            value = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
        else:
            value = torch.nn.functional.pad(value, (0, missing), value=fill)
    return torch.cat([value, value.new_full((rows - len(value), *value.shape[1:]), fill)])


CACHED_SCHEDULES = 4
"""Number of cached schedules with their receive buffers, by the shapes of their microbatches."""


class Pipeline:
    """The stages of `model` in this process; all other modules are removed from the model.

    group: the processes of the pipeline, in the order of their stages. per_process: stages of each process;
    process s of P has the stages s, s + P, s + 2 P, ... divide: shards the local modules further
    (`fully_sharded.py`), and moves them to their device; heads are divided before (`tensor_parallel.py`).
    Raises `InputError` for models that need all their layers in one process.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        schedule: PipelineSchedule = "1f1b",
        per_process: int = 1,
        precision: Callable[[], AbstractContextManager[object]] = nullcontext,
        divide: Callable[[PipelineRoot], object] = lambda _: None,
    ):
        self.model = check_pipelined(model)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.per_process = group, per_process
        self.schedule: PipelineSchedule = schedule
        self.layers = [len(stack.groups) for stack in stacks(self.model).values()]
        self.spans = stage_spans(sum(self.layers), self.size * per_process)
        self.last = len(self.spans) - 1
        self.local_stages = range(self.rank, len(self.spans), self.size)
        own = [self.spans[rank :: self.size] for rank in range(self.size)]
        self.owners = ParameterOwners(self.model, own, group)
        self.owners.remove_unowned()
        self.root = PipelineRoot(self.model)
        divide(self.root)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.shared = self._shared()
        self.stages = {stage: Stage(self.root, self.spans[stage], precision) for stage in self.local_stages}
        self.schedules: OrderedDict[tuple[Any, ...], Any] = OrderedDict()  # by sizes, in order of last use

    def _shared(self) -> dict[nn.Parameter, tuple[bool, dist.ProcessGroup]]:
        """Return parameters shared with other stages: whether this is their first process, their group."""
        members = dist.get_process_group_ranks(self.group)
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        shared = {}
        for parameter, ranks in self.owners.current():
            if isinstance(parameter, nn.Parameter) and self.rank in ranks and len(ranks) > 1:
                if ranks not in groups:
                    world = [members[rank] for rank in ranks]
                    groups[ranks] = dist.new_group(world, use_local_synchronization=True)  # type: ignore[assignment]
                shared[parameter] = (ranks[0] == self.rank, groups[ranks])
        return shared

    def step(self, batches: list[Batch], shares: list[float]) -> list[float]:
        """Run the forward and backward passes of one step, and return the losses in every process.

        Adds the gradients of sum_i shares_i loss_i to the existing gradients.
        """
        batch = same_shape(batches, shares)
        schedule = self._schedule_for(_lengths(batch), len(batch["input_ids"]), len(batches))
        ids = batch.pop("input_ids")
        for stage in self.stages.values():
            stage.losses.clear()
        first = (ids,) if 0 in self.local_stages else ()
        target = torch.tensor(shares, dtype=torch.float64, device=self.device)
        schedule.step(*first, target=target, return_outputs=False, **batch)
        for parameter, (_, group) in self.shared.items():  # so that the copies in the stages stay equal
            _sum_gradient(parameter, group)
        values = torch.stack([torch.stack(stage.losses) for stage in self.stages.values()]).sum(0)
        dist.all_reduce(values, group=self.group)
        return values.tolist()

    def _schedule_for(self, lengths: tuple[int, int], rows: int, microbatches: int) -> Any:
        """Return the schedule for microbatches of these sizes."""
        key = lengths, rows, microbatches
        if key in self.schedules:
            self.schedules.move_to_end(key)
        else:
            if len(self.schedules) == CACHED_SCHEDULES:
                self.schedules.popitem(last=False)
            stages = [self._stage(stage, rows // microbatches, lengths) for stage in self.local_stages]
            common: dict[str, Any] = {
                "n_microbatches": microbatches,
                "loss_fn": lambda loss, share: loss * share.to(loss.dtype).squeeze(),
                "scale_grads": False,
            }
            if self.per_process > 1:
                self.schedules[key] = ScheduleInterleaved1F1B(list(stages), **common)
            else:
                kind = ScheduleGPipe if self.schedule == "gpipe" else Schedule1F1B
                self.schedules[key] = kind(stages[0], **common)
        return self.schedules[key]

    def _stage(self, number: int, rows: int, lengths: tuple[int, int]) -> PipelineStage:
        """Return stage `number` for microbatches of these sizes; the shapes are known without a trial run."""
        loss = torch.empty((), dtype=self.dtype, device="meta").requires_grad_()
        return PipelineStage(
            self.stages[number],
            number,
            self.last + 1,
            self.device,
            input_args=self._input_buffers(number, rows, lengths, "meta"),
            output_args=loss
            if number == self.last
            else self._input_buffers(number + 1, rows, lengths, "meta"),
            group=self.group,
        )

    def _input_buffers(
        self, number: int, rows: int, lengths: tuple[int, int], device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """Return empty tensors for the inputs of stage `number`.

        They are ids, or hidden states of the text or source, and also of the target after its first layers.
        """
        if number == 0:
            return (torch.empty(rows, lengths[0], dtype=torch.long, device=device),)
        target = len(self.layers) == 2 and self.spans[number].start > self.layers[0]
        sizes = lengths if target else lengths[:1]
        width = self.model.config.hidden_size
        return tuple(
            torch.empty(rows, size, width, dtype=self.dtype, device=device).requires_grad_() for size in sizes
        )

    def sum_over_replicas(self, group: dist.ProcessGroup) -> None:
        """Sum the gradients over the replicas of the model, which are the processes of `group`."""
        for parameter in self.model.parameters():
            _sum_gradient(parameter, group)

    def norm(self) -> Tensor:
        """Return the norm of the whole gradient, float64."""
        counted = (p for p in self.model.parameters() if p not in self.shared or self.shared[p][0])
        total = gradient_norm(counted).square().to(self.device)
        dist.all_reduce(total, group=self.group)
        return total.sqrt()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> ModelOutput:
        """Return the output of the whole model for `batch`, in every process.

        Logits are broadcast when they are first read, which is collective: all processes must read them.
        """
        rest, output = dict(batch), None
        values: tuple[Tensor, ...] = (rest.pop("input_ids"),)
        for number, stage in self.stages.items():
            if number and self.size > 1:
                values = self._input_buffers(number, len(values[0]), _lengths(batch), self.device)
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
        return self._broadcast_output(output)

    def _broadcast_output(self, output: ModelOutput | None) -> ModelOutput:
        """Return the output of the last stage in all processes."""
        source = self.last % self.size

        def from_last(value: Tensor | None) -> Tensor | None:
            """Broadcast `value`, any tensor or None, from the process of the last stage."""
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


def _sum_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    if parameter.requires_grad:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(local_shard(parameter.grad), group=group)


class PipelinedModel(nn.Module):
    """A module that runs a model by its pipeline without gradients. Collective: all processes call it."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.pipeline, self.stages = pipeline, pipeline.model
        self.config = pipeline.model.config

    def forward(self, **batch: Tensor) -> ModelOutput:
        """Return the output of the whole model."""
        return self.pipeline.evaluate(batch)


def _lengths(batch: Batch) -> tuple[int, int]:
    """Return the tokens per row: of the text or source, and of the target if there is one."""
    target = batch.get("decoder_input_ids", batch.get("labels", batch["input_ids"]))
    return batch["input_ids"].shape[1], target.shape[-1]
