"""The processes of a run, through accelerate."""

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError
from polyformer.training.distributed.process_group import raise_peer_failure, reinit_process_group

if TYPE_CHECKING:
    from accelerate import Accelerator


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
