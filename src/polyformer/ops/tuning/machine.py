"""What the choices of a machine depend on: its processor, what it may use of it, the versions."""

import functools
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

CORE_CACHE = 1 << 20
"""Bytes of cache a core has of its own where the system does not say."""

LAST_CACHE = 32 << 20
"""Bytes of the last cache where the system does not say."""


@functools.cache
def processor() -> str:
    """Its name with family and model, for virtual machines call very different ones by the same name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [facts[key] for key in ("cpu family", "model") if key in facts]
    return f"{name} ({'/'.join(numbers)})" if numbers else name


def instruction_set() -> str:
    """The widest vectors that torch may use here ("AVX512", "AVX2"), and oneDNN's limit if one is set."""
    own = torch.backends.cpu.get_cpu_capability()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    return f"{own}, oneDNN up to {limit}" if limit else own


@functools.cache
def core_cache() -> int:
    """Bytes of the second-level cache, which on today's processors a core has to itself."""
    return _size("SC_LEVEL2_CACHE_SIZE", CORE_CACHE)


@functools.cache
def last_cache() -> int:
    """Bytes of the last cache before memory, as far as one processor's cores share it."""
    return _size("SC_LEVEL3_CACHE_SIZE", LAST_CACHE)


def _size(name: str, default: int) -> int:
    """What the system says, or `default` where it says nothing."""
    try:
        size = os.sysconf(name)
    except (AttributeError, ValueError, OSError):
        return default
    return size if size > 0 else default


def described() -> dict[str, str]:
    """All that the choices are kept by, except the number of threads."""
    return {
        "processor": processor(),
        "instruction set": instruction_set(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "polyformer": importlib.metadata.version("polyformer"),
    }
