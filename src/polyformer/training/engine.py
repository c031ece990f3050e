"""Where and how the passes run: device, processes, precision, compilation. Built on `accelerate`."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyformer.core.errors import InputError
from polyformer.ops.tuning import store
from polyformer.ops.workers import usual_threads
from polyformer.training.config import EngineConfig
from polyformer.training.environment import PROCESSOR, THREADS, differences, machine, versions
from polyformer.training.signals import Asked
from polyformer.training.task import Batch

if TYPE_CHECKING:
    from accelerate import Accelerator

HALVES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def is_main() -> bool:
    """Whether this process is the only one of its run, or the first; known before there is an engine."""
    return int(os.environ.get("RANK", "0")) == 0


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
        config.parallel.check_built()
        config.parallel.sizes(
            int(os.environ.get("WORLD_SIZE", "1"))
        )  # before the processes wait for each other
        if not config.parallel.whole:
            raise InputError("parallel: shard and tensor: not yet; leave them at 1")
        self.accelerator = _accelerator("cuda" if use_cuda else "cpu")
        self.device = self.accelerator.device
        if config.precision == "fp16" and self.device.type != "cuda":
            raise InputError("precision: 'fp16' needs a CUDA device; on the CPU use 'bf16' or 'no'")
        self.rank = self.accelerator.process_index
        self.world = self.accelerator.num_processes
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.wrapped: nn.Module = nn.Identity()

    def wrap(self, model: nn.Module) -> None:
        """Take `model` (on `device`) as the one that runs; its own names and attributes stay as they are."""
        wrapped = self.accelerator.prepare_model(model) if self.world > 1 else model
        self.wrapped = torch.compile(wrapped) if self.config.compile else wrapped  # type: ignore[assignment]

    def autocast(self) -> AbstractContextManager[object]:
        """The context of the forward pass in the configured precision."""
        if self.config.precision == "no":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=HALVES[self.config.precision])

    def unsynced(self, skip: bool) -> AbstractContextManager[object]:
        """With `skip`, gradients of this pass stay in the process: only the last of a step is exchanged."""
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
        return self.accelerator.reduce(mine, "sum") if self.world > 1 else mine  # type: ignore[return-value]

    def rows(self, values: torch.Tensor) -> list[list[float]]:
        """`values` [n] of every process, one row each. Waits for the device."""
        gathered = self.accelerator.gather(values[None]) if self.world > 1 else values[None]
        return gathered.tolist()  # type: ignore[union-attr]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows [B, ...] of all processes, as many of each, one process after another."""
        return self.accelerator.gather(tensor) if self.world > 1 else tensor  # type: ignore[return-value]

    def agree(self, value: Any) -> Any:
        """What the first process has for `value`."""
        if self.world == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def together(self, asked: Asked) -> Asked:
        """What signals have asked any process for."""
        if self.world == 1:
            return asked
        mine = torch.tensor([asked.stop, asked.save], dtype=torch.float64, device=self.device)
        stops, saves = zip(*self.rows(mine))
        return Asked(int(max(stops)), bool(max(saves)))

    def machine(self) -> dict[str, Any]:
        """What computes, as checkpoints record it."""
        return machine(self.device, self.world)

    def choose_threads(self, model: nn.Module, saved: dict[str, Any] | None) -> tuple[int, list[str]]:
        """How many threads train `model`, and what to say of a run whose state is `saved`.

        A resumed run computes with as many as it began with, if nothing else is asked for: sums split
        otherwise round otherwise.
        """
        own = self.config.threads or usual_threads(model)
        if saved is None:
            return own, []
        before = saved["machine"].get(THREADS, own)
        number = self.config.threads or before
        notes = [f"{number} threads, as the run began; --training.engine.threads N for others"]
        now = {**self.machine(), THREADS: number, **versions()}
        changed = differences({**saved["machine"], **saved["versions"]}, now)
        if changed:
            return number, [f"{'; '.join(changed)}: the last bits may differ from an uninterrupted run's"]
        return number, notes if number != own and self.device.type == "cpu" else []

    def choices(self, saved: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
        """The choices of tuning that the run whose state is `saved` was made with, and what to say of them.

        Another machine goes on with its own: there nothing would keep the bits.
        """
        before = {} if saved is None else saved.get("tuning", {})
        now = self.machine()
        if saved is None or any(saved["machine"].get(name) != now[name] for name in PROCESSOR):
            return {}, []
        pinned = store.pinned()
        if pinned is not None and any(pinned.get(name) != choice for name, choice in before.items()):
            return before, [f"{store.PIN} is set: the last bits may differ from an uninterrupted run's"]
        return before, []

    def update(self, optimizer: torch.optim.Optimizer, clip: float | None) -> torch.Tensor:
        """Clip the gradients, update the weights, forget the gradients; returns the norm before clipping."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm


def _accelerator(device: str) -> "Accelerator":
    from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType
    from accelerate.state import AcceleratorState, PartialState

    # accelerate keeps one state per program; a second run, alone in it, may choose differently.
    earlier = {**PartialState._shared_state, **AcceleratorState._shared_state}
    chosen = (device, "no")
    if earlier.get("num_processes") == 1 and chosen != (
        earlier["device"].type,
        earlier.get("_mixed_precision", "no"),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
    buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no", kwargs_handlers=[buckets])
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in plain:
        raise InputError(
            f"the launcher asks for {accelerator.distributed_type.value}; the training loop knows one "
            "process, or several with a whole model each: launch without sharding"
        )
    return accelerator


def check_recomputing(model: nn.Module, wanted: bool) -> None:
    """Raises `InputError` where no part of `model` can compute its activations again but that is wanted."""
    if wanted and not _switches(model):
        raise InputError(
            f"recompute: no part of {type(model).__name__} has an attribute 'recompute', so it cannot "
            "compute its activations again; set recompute to false"
        )


@contextmanager
def recomputing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Sets `recompute` on every part of `model` that has the switch, and puts it back at the end."""
    parts = _switches(model)
    before = [part.recompute for part in parts]
    for part in parts:
        part.recompute = wanted
    try:
        yield
    finally:
        for part, value in zip(parts, before):
            part.recompute = value


def _switches(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if hasattr(part, "recompute")]
