"""Processes that died or no longer answer: what is said of it, and how those started again meet."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polyformer.core import launcher
from polyformer.core.errors import InputError, shortened

SIGNS = ("gloo", "connection closed", "connection reset", "timed out waiting", "nccl")
"""Words of the errors by which torch's backends say so; they have no class of their own."""


def meet_again(backend: str, timeout: timedelta | None) -> None:
    """Open the group of all processes, where torchrun has started them again; elsewhere nothing.

    torch 2.13 lets every life of a run look up its peers under the same names of one store, which then still
    has the addresses of the dead ("Connection refused"); here each life has names of its own.
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
def answering() -> Iterator[None]:
    """Turns the failure of an exchange between processes into an `InputError` that says what to do."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not isinstance(error, dist.DistError) and not any(sign in text.lower() for sign in SIGNS):
            raise
        raise InputError(
            f"another process of this run died or did not answer in time (process {launcher.rank()} of "
            f"{launcher.world()} says so: {shortened(text, 300)}); what was saved before is intact: look at "
            "what the one said that says something else or nothing, and go on with --resume, or by itself "
            "under torchrun --max-restarts N; training.engine.timeout says for how many seconds they wait"
        ) from error
