"""The machine of a run: its device, the precision of products, the processes and their mesh.

The device, the versions of libraries, the processor and the number of threads affect the last bits of the
results: checkpoints record them. The precision is the type of autocast, and TF32 for the remaining float32
products.

Processes are started by a launcher (torchrun, accelerate), known from its settings before they connect, and
joined through accelerate. Here are also their failures and the rendezvous of restarted processes. The mesh
arranges them along the dimensions of `ParallelConfig`, as torch's `DeviceMesh`.
"""

import functools
import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polyformer.core import __version__
from polyformer.core.errors import InputError, shortened
from polyformer.core.ops.tuning import processor
from polyformer.training.config import DIMENSIONS, ParallelConfig

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def rank() -> int:
    """Return the number of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of launched processes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


THREADS = "threads"
PROCESSOR = "device", "instructions", "onednn"


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda"; raise `InputError` if it is unavailable."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device: 'cuda' was requested, but torch finds no CUDA device; use 'auto' or 'cpu'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that affect the results of a run."""
    return {
        "polyformer": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(device: torch.device, processes: int) -> dict[str, Any]:
    """Return a description of the hardware: threads split sums, the instruction set selects kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": name,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
        THREADS: torch.get_num_threads(),
        "processes": processes,
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a text for each entry that differs between `before` and `now`.

    Versions of Python and numpy are ignored, because they do not change the results of torch.
    """
    names = [name for name in before if name in now and name not in ("python", "numpy")]
    return [f"{name} {before[name]}, now {now[name]}" for name in names if before[name] != now[name]]


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(precision: str, device: torch.device) -> str:
    """Return the configured precision; for "auto" bf16 on a GPU that supports it, otherwise "no".

    Raises `InputError` for fp16 without a GPU.
    """
    if precision == "fp16" and device.type != "cuda":
        raise InputError("precision: 'fp16' needs a CUDA device; on the CPU use 'bf16' or 'no'")
    if precision != "auto":
        return precision
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_bf16 else "no"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass in a precision chosen by `choose_precision`."""
    if precision == "no":
        return nullcontext()
    return torch.autocast(device.type, dtype=HALVES[precision])


@contextmanager
def tensor_float32(precision: str, device: torch.device) -> Iterator[None]:
    """Let a GPU round the factors of the remaining float32 products to 10 bits, if `autocast` rounds others.

    bfloat16 has 7 bits. A lower precision that was already set remains.
    """
    if device.type != "cuda" or precision == "no":
        yield
        return
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


PEER_FAILURE_WORDS = ("gloo", "connection closed", "connection reset", "timed out waiting", "nccl")
"""Words in the errors of torch's backends for failed peers; these errors have no separate class."""


def reinit_process_group(backend: str, timeout: timedelta | None) -> None:
    """Initialize the process group if torchrun has restarted the processes; otherwise do nothing.

    In torch 2.13 every restart of a run looks up its peers under the same names in one store, which then
    still has the addresses of the dead processes ("Connection refused"); here each restart has separate
    names.
    """
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not life or not agent or dist.is_initialized():
        return
    world = int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"life-{life}", TCPStore(*address, world, is_master=False))
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


@contextmanager
def raise_peer_failure() -> Iterator[None]:
    """Convert the failure of a collective into an `InputError` that says how to continue."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and not any(
            sign in text.lower() for sign in PEER_FAILURE_WORDS
        ):
            raise
        raise InputError(
            f"another process of this run died or did not answer in time (process {rank()} of "
            f"{world()} reports: {shortened(text, 300)}); saved checkpoints are intact; look for "
            "the cause in the output of the other processes, and continue with --resume, or automatically "
            "under torchrun --max-restarts N; training.engine.timeout sets the seconds that processes wait"
        ) from error


def open_accelerator(device: str, timeout: float | None) -> "Accelerator":
    """Return the accelerator of this program on "cpu" or "cuda".

    timeout: seconds that processes wait for each other; None uses torch's default. Raises `InputError` if the
    launcher is configured for its own sharding, or if another process does not join.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState, PartialState

    # accelerate keeps global state; a second run with a single process may use another device.
    earlier = {**PartialState._shared_state, **AcceleratorState._shared_state}
    chosen = (device, "no")
    if earlier.get("num_processes") == 1 and chosen != (
        earlier["device"].type,
        earlier.get("_mixed_precision", "no"),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
    buckets = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    wait = None if timeout is None else timedelta(seconds=timeout)
    handlers: list[Any] = [buckets] if wait is None else [buckets, InitProcessGroupKwargs(timeout=wait)]
    with raise_peer_failure():
        reinit_process_group("nccl" if device == "cuda" else "gloo", wait)
        accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no", kwargs_handlers=handlers)
    plain = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in plain:
        raise InputError(
            f"the launcher asks for {accelerator.distributed_type.value}; the training loop knows one "
            "process, or several with a whole model each: launch without sharding"
        )
    return accelerator


@dataclass(frozen=True)
class Mesh:
    """The position of this process among all; `device_mesh` has all `DIMENSIONS`, even of size 1."""

    device_mesh: "DeviceMesh"

    def size(self, name: str) -> int:
        """Return the number of processes along dimension `name`."""
        return self.device_mesh.size(DIMENSIONS.index(name))

    def rank(self, name: str) -> int:
        """Return the rank of this process along dimension `name`."""
        return self.device_mesh.get_local_rank(name)

    def group(self, name: str) -> "ProcessGroup":
        """Return the group of processes that differ from this process only along `name`, including itself."""
        return self.device_mesh.get_group(name)

    @property
    def data_world(self) -> int:
        """Return the number of processes, or groups of processes, that read separate batches."""
        return self.size("data") * self.size("shard")

    @property
    def data_rank(self) -> int:
        """Return the data-parallel rank of this process; processes that share a batch have the same."""
        return self.rank("data") * self.size("shard") + self.rank("shard")

    @property
    def readers(self) -> list[int]:
        """Return the ranks of the processes that read batches, one per group, by their `data_rank`."""
        return self.device_mesh.mesh[0, :, :, 0, 0].flatten().tolist()

    @property
    def sharding(self) -> "DeviceMesh":
        """Return the mesh of sharded weights: [shard], or [data, shard] if there are several replicas.

        Processes that share texts (context) also shard the weights, so that their gradients are averaged in
        the same collective. A pipeline sums over its replicas after the last microbatch.
        """
        copies, parts = self.device_mesh["data"], self.device_mesh["shard"]
        if self.size("pipeline") > 1:
            return parts
        if self.size("context") > 1:
            parts = self.device_mesh["shard", "context"]._flatten("shard_context")
            return type(parts)._concatenate([copies, parts]) if self.size("data") > 1 else parts
        return self.device_mesh["data", "shard"] if self.size("data") > 1 else parts


class ReplicaGroup:
    """The replicas of a sharded model, with the interface of an `Accelerator` that tasks use."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.process_index, self.num_processes = mesh.rank("data"), mesh.size("data")

    def reduce(self, tensor: "torch.Tensor", reduction: str = "mean") -> "torch.Tensor":
        """Return the sum over the replicas."""
        import torch.distributed as dist

        total = tensor.clone()
        dist.all_reduce(total, group=self.mesh.group("data"))
        return total

    def gather_lists(self, values: list[Any]) -> list[Any]:
        """Return the lists of all replicas, concatenated; processes of one replica have the same list."""
        import torch.distributed as dist

        parts: list[list[Any]] = [[]] * self.num_processes
        dist.all_gather_object(parts, values, group=self.mesh.group("data"))
        return [value for part in parts for value in part]


def open_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """Return the mesh of all processes; `torch.distributed.init_process_group` must have been called.

    device_type: "cpu" or "cuda". Raises `InputError` in every process if their number does not fit.
    """
    import torch.distributed as dist

    sizes = config.sizes(dist.get_world_size())
    return Mesh(_device_mesh(tuple(sizes.values()), device_type, dist.group.WORLD))


@functools.cache
def _device_mesh(sizes: tuple[int, ...], device_type: str, world: "ProcessGroup") -> "DeviceMesh":
    """Return a cached mesh, because the threads of its groups live as long as the process."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)
