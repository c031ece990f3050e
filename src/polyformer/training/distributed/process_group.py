"""The processes of a run through accelerate, their failures, and the rendezvous of restarted processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polyformer.core.errors import InputError, shortened
from polyformer.training.launcher import rank, world

if TYPE_CHECKING:
    from accelerate import Accelerator


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
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = PrefixStore(f"life-{life}", TCPStore(*address, world(), is_master=False))
    dist.init_process_group(backend, store=store, rank=rank(), world_size=world(), timeout=timeout)


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
