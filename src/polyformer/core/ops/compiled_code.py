"""The cache of compiled code that torch keeps for later processes, separated by instruction set."""

import torch
from torch.compiler import config


def separate_by_instructions() -> None:
    """Let this process load only code that was compiled for the same instruction set.

    torch (2.13) does not include the instruction set in the keys of its cache. A loop generated for AVX-512
    takes steps of 16 numbers. A process limited to AVX2 that loads it computes 8 of them and leaves the other
    8 uninitialised, without an error; FlexAttention's kernel crashes. This happens if different processors
    share a cache folder, and after a change of `ATEN_CPU_CAPABILITY`.
    """
    own = torch.backends.cpu.get_cpu_capability()
    if own not in config.cache_key_tag.split():
        config.cache_key_tag = f"{config.cache_key_tag} {own}".strip()
